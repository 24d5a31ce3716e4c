"""The trainer service as it is, but that each load may be at another ZeRO stage: the name of the model's folder."""

from pathlib import Path
from typing import Any

from tasks.train import service
from tasks.train.protocol import Command, Load
from tasks.train.worker import Worker


class StagedWorker(Worker):
    def run(self, command: Command) -> Any:
        if isinstance(command, Load):
            stage = int(Path(command.model).name)
            self._config = self._config.model_copy(update={"zero_stage": stage})
            self._transfer._config = self._transfer._config.model_copy(update={"train": self._config})
        return super().run(command)


if __name__ == "__main__":
    service.Worker = StagedWorker  # type: ignore[misc]
    service.main()
