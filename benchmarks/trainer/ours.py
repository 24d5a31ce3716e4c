"""Steps of this trainer: its engine and its step, on one rank that is this process."""

import os
from pathlib import Path

import torch

from benchmarks.trainer.work import SETTINGS, samples_of
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.train.batch_training import UpdateLoop
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Update
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.service.ranks import join_ranks

Gradient = dict[str, torch.Tensor]


class RecordingEngine(Engine):
    """Keeps the gradient of the first update."""

    gradient: Gradient | None = None

    def update(self, lr: float) -> Update:
        """As of the engine."""
        if self.gradient is None:
            self.gradient = {
                name: each.grad.clone()
                for name, each in self.model.named_parameters()
                if each.grad is not None
            }
        return super().update(lr)


class Ours:
    """This trainer with the settings of `work`, and those given."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {**rank, "MASTER_PORT": str(free_port())}
        self._config = TrainConfig.model_validate(SETTINGS | settings)
        self._samples, self._objective = samples_of(folder), Objective(self._config)
        device = join_ranks(60.0).device
        self._engine = RecordingEngine.load(self._config, str(folder / "model"), device)

    def step(self) -> None:
        """One optimizer update with the batch."""
        training = UpdateLoop(self._config, self._engine, self._samples, 0, self._objective)
        training.run()
        assert not training.reason

    @property
    def gradient(self) -> Gradient:
        """Of the first step, by parameter."""
        assert self._engine.gradient is not None
        return self._engine.gradient
