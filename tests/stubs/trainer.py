"""A trainer that sleeps: the product's control API over commands of a given duration."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_messages import ProcessLocation, SendResult, WeightOffer
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.answers import CheckpointBegun, CheckpointWritten, StepResult, TrainerHealth
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    Command,
    ComputeLogprobs,
    DigestState,
    DigestWeights,
    LoadPolicy,
    OfferWeights,
    SendWeights,
    TrainStep,
)
from rollmill.tasks.train.service.control_api import ControlServer, Operations, build_control_app
from tests.stubs.toy_settings import toy_config

NO_WEIGHTS = TransferPlan()
HERE = ProcessLocation("here", "cpu")
LOGPROB = -1.0
"""What every token has, here and at the stub server, so that the two always agree."""


@dataclass
class StubTrainer:
    """A stub of a trainer.

    Attributes:
        train_s: seconds of one training step.
        send_s: seconds of sending the weights.
        started_s: when each training step began, in seconds of `time.perf_counter`.
    """

    train_s: float
    send_s: float
    settings: TrainConfig = field(default_factory=lambda: toy_config().train)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    started_s: list[float] = field(default_factory=list)
    _run: str = ""
    _incarnation: int = 0
    _version: int = -1
    _digest: str = ""

    def serve(self, port: int) -> ControlServer:
        """Answer at a loopback port, on a thread."""
        return ControlServer(build_control_app(Operations(), self, self.token), "127.0.0.1", port)

    def answers_at_once(self, _command: Command[Any]) -> bool:
        return True

    def progress(self, _command: Command[Any]) -> dict[str, int]:
        return {}

    def run(self, command: Command[Any]) -> Any:
        match command:
            case LoadPolicy():
                return self._load(command)
            case TrainStep():
                return self._train(command)
            case ComputeLogprobs(sequences=sequences):
                return [[LOGPROB] * (len(each) - 1) for each in sequences]
            case OfferWeights():
                return WeightOffer(NO_WEIGHTS, "127.0.0.1", 0, HERE)
            case SendWeights():
                return self._send(command)
            case BeginCheckpoint():
                return CheckpointBegun(is_new=True, held_s=0.0)
            case AwaitCheckpoint():
                return self._await_checkpoint(command)
            case DigestWeights() | DigestState():
                return {}
            case _:
                return None

    def health(self) -> TrainerHealth:
        return TrainerHealth(
            run=self._run,
            incarnation=self._incarnation,
            version=self._version,
            digest=self._digest,
            world_size=1,
            heartbeats=[0.0],
            busy="",
            settings=self.settings.model_dump(mode="json"),
            device="cpu",
        )

    def _load(self, command: LoadPolicy) -> None:
        self._run, self._incarnation, self._version = command.run_id, command.incarnation, command.version

    def _train(self, command: TrainStep) -> StepResult:
        self.started_s.append(time.perf_counter())
        time.sleep(self.train_s)
        self._version, self._digest = command.step + 1, command.digest
        return StepResult(self._version, True, "", [], self.train_s)

    def _send(self, command: SendWeights) -> list[SendResult]:
        time.sleep(self.send_s)
        return [SendResult(each.server, 0, self.send_s) for each in command.targets]

    def _await_checkpoint(self, command: AwaitCheckpoint) -> CheckpointWritten:
        return CheckpointWritten(command.version, written_s=0.0, n_bytes=0)
