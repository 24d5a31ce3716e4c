"""What a trainer answers: results of commands, its state, and the progress of an operation. The flow imports it, so it has no torch."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.spans import Span
from rollmill.tasks.store.staged_rows import StagedRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a training step.

    Attributes:
        version: policy version that the step produced.
        updated: False when the weights are the same as in the version before.
        reason: why there was no update; empty when there was one.
        metrics: the step's metrics, by environment and for `all` together.
        duration_s: seconds from the first row read to the last update.
        staged: rows of data sets that the step made and staged, to be stored by the flow.
    """

    version: int
    updated: bool
    reason: str
    metrics: list[Metric]
    duration_s: float
    staged: tuple[StagedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """Answer to BeginCheckpoint: whether a checkpoint is now being written, and how long training was held.

    Attributes:
        is_new: False when the checkpoint was complete already, and nothing is written.
        held_s: seconds that training was held while the state was copied.
    """

    is_new: bool
    held_s: float


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Answer to AwaitCheckpoint: size and duration of a complete checkpoint.

    Attributes:
        version: policy version.
        written_s: seconds from the end of the copy in memory until the checkpoint was complete.
        n_bytes: size of all its files but the marker, in bytes.
    """

    version: int
    written_s: float
    n_bytes: int


@dataclass(frozen=True, slots=True)
class TrainerHealth:
    """State of the trainer, as GET /v1/health reports it.

    Attributes:
        run: random id of the loaded run; empty before the first load.
        incarnation: the run's count of trainer loads at the last load.
        version: policy version; -1 before the first load.
        digest: digest of the last applied batch; empty when there is none.
        world_size: number of ranks, W.
        heartbeats: [W] seconds since the last heartbeat of each rank.
        busy: name of the command being carried out; empty when idle.
        settings: the TrainConfig that the trainer was started with.
        device: what rank 0 computes on, such as "cpu" or "cuda:0 (NVIDIA H100 80GB HBM3)".
    """

    run: str
    incarnation: int
    version: int
    digest: str
    world_size: int
    heartbeats: list[float]
    busy: str
    settings: dict[str, Any]
    device: str


class OperationState(msgspec.Struct, frozen=True):
    """Progress or outcome of a command, as GET /v1/operations/ID reports it.

    Attributes:
        status: running, done or failed.
        progress: bytes sent to each server so far; empty for a command that sends no weights.
        answer: the command's answer in MessagePack, once it is done.
        error_type: class of the error that the command failed with.
        error: text of that error.
        spans: timed activities of the ranks during the command and since the command before it.
    """

    status: Literal["running", "done", "failed"]
    progress: dict[str, int] = {}
    # MessagePack's nil: an empty Raw is no valid message.
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    error_type: str = ""
    error: str = ""
    spans: list[Span] = []
