"""What the trainer and its client say to each other; neither torch nor HTTP is imported here."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tasks.config import StageConfig
from tasks.observe.metrics import Metric
from tasks.store.deliveries import Delivery
from tasks.sync.config import SyncConfig
from tasks.train.config import TrainConfig

IDEMPOTENCY_KEY = "Idempotency-Key"
"""Header of a command: whoever asks makes it up, and sends it again with the command whose answer was lost."""


class ServiceConfig(StageConfig):
    """Settings of one trainer service, as its command line names them in a JSON file.

    Attributes:
        train: settings of the training.
        sync: settings of the weight sync.
        host: address that the control API listens on.
        port: port of the control API.
        log_dir: folder for logs beside the service's own output.
    """

    train: TrainConfig
    sync: SyncConfig
    host: str = "127.0.0.1"
    port: int
    log_dir: str


class Command(BaseModel):
    """A request to the trainer.

    Attributes:
        name: the last part of its address.
        is_joined: True when the same command, sent again while it is under way, is the same operation.
        owner: name of the span that has all of its time; empty when its parts have spans of their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: ClassVar[str]
    is_joined: ClassVar[bool] = False
    owner: ClassVar[str] = ""


class Load(Command):
    """Stand at `version` of a run: from a checkpoint's folder, or from a model's when there is none."""

    name = "load"
    owner = "loading"
    is_joined = True
    run: str
    incarnation: int
    model: str
    folder: str
    checkpoint: str | None
    version: int


class TrainStep(Command):
    """Apply the batch of a step, once.

    Attributes:
        hands_over: False when nothing is to be written: no annotations, no log-probabilities that were computed.
    """

    name = "train_step"
    is_joined = True
    folder: str
    run: str
    step: int
    digest: str
    hands_over: bool = True


class ScoreRows(Command):
    """Compute the trainer's log-probabilities of stored rollouts of the step that it stands at."""

    name = "score_rows"
    owner = "recomputing"
    folder: str
    run: str
    step: int
    trajectory_ids: list[str]


class Logprobs(Command):
    """Raw log-probabilities of known tokens."""

    name = "logprobs"
    owner = "parity"
    sequences: list[list[int]]


class Offer(Command):
    """What the trainer has to give to servers."""

    name = "offer"


class Send(Command):
    """Send the weights to servers.

    Attributes:
        targets: each a Target of tasks.sync.order as JSON.
    """

    name = "send"
    targets: list[dict[str, Any]]


class WriteWeights(Command):
    """Write the version that the trainer stands at into safetensors files below a folder, in place of older ones there.

    Attributes:
        folder: a local path, or s3://bucket/prefix.
    """

    name = "write_weights"
    owner = "exporting"
    is_joined = True
    folder: str
    version: int


class TellSpans(Command):
    """Tell what all ranks have done, or waited for, since they told last."""

    name = "tell_spans"


class WeightDigests(Command):
    """SHA-256 of tensors as they are sent.

    Attributes:
        names: of the tensors, as the offer's plan has them; none: all.
    """

    name = "weight_digests"
    owner = "parity"
    names: list[str]


class Checkpoint(Command):
    """Copy everything that makes up a version, and begin to write it into RUN/checkpoints beside what comes next."""

    name = "checkpoint"
    is_joined = True
    folder: str
    version: int


class AwaitCheckpoint(Command):
    """Wait until the checkpoint of a version, which was begun last, is complete."""

    name = "await_checkpoint"
    version: int


class ExportPolicy(Command):
    """Write the weights as a Hugging Face model folder."""

    name = "export_policy"
    owner = "exporting"
    path: str


class StorePolicy(Command):
    """Write the version that the trainer stands at into RUN/policies, as a Hugging Face model folder."""

    name = "store_policy"
    owner = "exporting"
    is_joined = True
    folder: str
    version: int


class Digests(Command):
    """Digests of every tensor of weights and moments."""

    name = "digests"
    owner = "exporting"


class Shutdown(Command):
    """End the service."""

    name = "shutdown"


COMMANDS: dict[str, type[Command]] = {
    each.name: each
    for each in (
        Load,
        TrainStep,
        ScoreRows,
        Logprobs,
        Offer,
        Send,
        WriteWeights,
        WeightDigests,
        Checkpoint,
        AwaitCheckpoint,
        ExportPolicy,
        StorePolicy,
        Digests,
        TellSpans,
        Shutdown,
    )
}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        version: the policy version that the step produced.
        updated: False when the weights are those of the version before.
        reason: why there was no update; empty when there was one.
        metrics: by environment and `all`.
        duration_s: seconds from the first row read to the last update.
        deliveries: rows of data sets that it made, to be stored.
        starts_ns: when each rank began, by its process, in nanoseconds since 1970; filled in by who asked, by its clock.
    """

    version: int
    updated: bool
    reason: str
    metrics: list[Metric]
    duration_s: float
    deliveries: tuple[Delivery, ...] = ()
    starts_ns: dict[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "StepResult":
        """The inverse of dataclasses.asdict; without deliveries where none are named."""
        deliveries = tuple(Delivery.parse(each) for each in values.get("deliveries", ()))
        metrics = [Metric(**each) for each in values["metrics"]]
        return cls(**values | {"metrics": metrics, "deliveries": deliveries})


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """A checkpoint that is being written.

    Attributes:
        is_new: False when it was complete already, and nothing is written.
        held_s: seconds that training was held while the state was copied.
    """

    is_new: bool
    held_s: float


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint that is complete.

    Attributes:
        version: policy version.
        written_s: seconds from the end of the copy to the marker.
        n_bytes: of all its files but the marker.
    """

    version: int
    written_s: float
    n_bytes: int


@dataclass(frozen=True, slots=True)
class TrainerHealth:
    """Where the trainer stands.

    Attributes:
        run: random id of the run it has loaded; empty before the first load.
        incarnation: the run's counter at that load.
        version: policy version; -1 before the first load.
        digest: digest of the last batch it applied; empty when there is none.
        world_size: ranks (W).
        heartbeats: [W] seconds since each rank was last heard of.
        busy: the command it is at; empty when idle.
        settings: the TrainConfig it was started with.
    """

    run: str
    incarnation: int
    version: int
    digest: str
    world_size: int
    heartbeats: list[float]
    busy: str
    settings: dict[str, Any]
