"""The trainer service as it is, but that each load may be at another ZeRO stage: the name of the model's folder."""

from pathlib import Path

from rollmill.tasks.train.service import trainer_process
from rollmill.tasks.train.service.commands import LoadPolicy
from rollmill.tasks.train.service.rank_worker import RankWorker


class StagedWorker(RankWorker):
    def load(self, command: LoadPolicy) -> None:
        stage = int(Path(command.model).name)
        self._config = self._config.model_copy(update={"zero_stage": stage})
        self.transfer._config = self.transfer._config.model_copy(update={"train": self._config})
        super().load(command)


if __name__ == "__main__":
    trainer_process.RankWorker = StagedWorker  # type: ignore[misc]
    trainer_process.main()
