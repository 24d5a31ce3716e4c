"""A trainer that sleeps: the product's control API over commands that take as long as they are told."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from tasks.sync.buckets import TransferPlan
from tasks.sync.order import Place, Sent, WeightOffer
from tasks.train.config import TrainConfig
from tasks.train.control import ControlServer, LocalCommands, control_app
from tasks.train.operations import Operations
from tasks.train.protocol import (
    COMMANDS,
    AwaitCheckpoint,
    Checkpoint,
    CheckpointBegun,
    CheckpointWritten,
    Load,
    Logprobs,
    Send,
    StepResult,
    TrainerHealth,
    TrainStep,
)

NO_WEIGHTS = TransferPlan((), 0, ((),))
HERE = Place("here", "cpu")
LOGPROB = -1.0
"""What every token has, here and at the stub server, so that the two always agree."""


@dataclass
class StubTrainer:
    """Stands for a trainer.

    Attributes:
        train_s: seconds of one training step.
        send_s: seconds of sending the weights.
        started_s: when each training step began, in seconds of `time.perf_counter`.
    """

    train_s: float
    send_s: float
    settings: TrainConfig = field(default_factory=TrainConfig)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    started_s: list[float] = field(default_factory=list)
    _run: str = ""
    _incarnation: int = 0
    _version: int = -1
    _digest: str = ""

    def serve(self, port: int) -> ControlServer:
        """Answer at a loopback port, on a thread."""
        commands: LocalCommands = dict.fromkeys(COMMANDS, _nothing) | {
            "load": self._load,
            "train_step": self._train,
            "logprobs": _logprobs,
            "offer": lambda _: WeightOffer(NO_WEIGHTS.to_json(), "127.0.0.1", 0, HERE.to_json()),
            "send": self._send,
            "checkpoint": _checkpoint,
            "await_checkpoint": self._await_checkpoint,
        }
        return ControlServer(
            control_app(Operations(), commands, {}, self._health, self.token), "127.0.0.1", port
        )

    def _health(self) -> TrainerHealth:
        return TrainerHealth(
            run=self._run,
            incarnation=self._incarnation,
            version=self._version,
            digest=self._digest,
            world_size=1,
            heartbeats=[0.0],
            busy="",
            settings=self.settings.model_dump(mode="json"),
        )

    def _load(self, command: Load) -> None:
        self._run, self._incarnation, self._version = command.run, command.incarnation, command.version

    def _train(self, command: TrainStep) -> StepResult:
        self.started_s.append(time.perf_counter())
        time.sleep(self.train_s)
        self._version, self._digest = command.step + 1, command.digest
        return StepResult(self._version, True, "", [], self.train_s)

    def _send(self, command: Send) -> list[Sent]:
        time.sleep(self.send_s)
        return [Sent(each["server"], 0, self.send_s) for each in command.targets]

    def _await_checkpoint(self, command: AwaitCheckpoint) -> CheckpointWritten:
        return CheckpointWritten(command.version, written_s=0.0, n_bytes=0)


def _nothing(_: Any) -> None:
    return None


def _logprobs(command: Logprobs) -> list[list[float]]:
    return [[LOGPROB] * (len(each) - 1) for each in command.sequences]


def _checkpoint(_: Checkpoint) -> CheckpointBegun:
    return CheckpointBegun(is_new=True, held_s=0.0)
