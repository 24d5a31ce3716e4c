"""Commands of the trainer: what the flow sends, what each rank does with it, and what comes back.

A command is one class: its fields are what the flow sends, `prepare` and `run` what the ranks do, and `Command[Answer]` names the
type of the answer. `TrainerClient.do(TrainStep(...))` returns it. A class that is defined here is known on both sides.
Neither torch nor HTTP is imported here, since the flow imports this module.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Union, get_args

import msgspec

from rollmill.tasks.errors import BatchRefusedError, RequestError, SyncError
from rollmill.tasks.store.checkpoints.checkpoint_store import clear_checkpoint, has_checkpoint, has_policy
from rollmill.tasks.store.checkpoints.weight_snapshots import list_complete_weights
from rollmill.tasks.store.folders import RunFolder, policy_key
from rollmill.tasks.store.staged_rows import StagedRows
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget, WeightOffer
from rollmill.tasks.train.service.answers import CheckpointBegun, CheckpointWritten, StepResult

if TYPE_CHECKING:
    # A rank has torch.
    from rollmill.tasks.train.service.rank_worker import RankWorker

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class StepRef:
    """Run and step whose rows are read, and for which new rows are staged.

    Attributes:
        folder: folder of the run.
        run: random id of the run.
        step: the step.
        incarnation: the run's count of trainer loads at the trainer's last load.
        stages_rows: False when nothing is to be written, as when a step is only compared.
    """

    folder: str
    run: str
    step: int
    incarnation: int
    stages_rows: bool = True


def _name_command(class_name: str) -> str:
    """Return a command's name in messages from its class name: "TrainStep" is "train_step"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Command(msgspec.Struct, Generic[Answer], kw_only=True, forbid_unknown_fields=True, tag=_name_command):
    """Base class of requests to the trainer; its type parameter `Answer` is the type of the trainer's answer.

    Attributes:
        is_joined: True when an equal command, sent again while this one is being carried out, counts as the same operation.
        is_local: True when rank 0 alone answers, on a thread, while the ranks may carry out another command.
        needs_policy: False for a command that is allowed before a policy is loaded, as local ones always are.
        span_name: name of the span that records the whole command; empty when its parts are recorded instead.
    """

    is_joined: ClassVar[bool] = False
    is_local: ClassVar[bool] = False
    needs_policy: ClassVar[bool] = True
    span_name: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The command's name in messages, such as "train_step"."""
        return str(self.__struct_config__.tag)

    def prepare(self, rank: "RankWorker") -> Answer | None:
        """Check the command on rank 0 before other ranks receive it; returns the answer if no rank needs to run, else None.

        Raises:
            RollmillError: the command is refused, and nothing has changed.
        """
        return None

    def run(self, rank: "RankWorker") -> Answer:
        """Carry out the command; every rank calls it, and rank 0's return value is the answer.

        Raises:
            RollmillError: the command failed, on rank 0 alone, and every rank is ready for the next command. Any other error
                ends the service.
        """
        raise NotImplementedError(self.name)

    def progress(self, rank: "RankWorker") -> dict[str, int]:
        """Return counts by name that show how far the command is, empty by default; called on any thread."""
        return {}


class LoadPolicy(Command[None]):
    """Command that loads a policy version in place of the current one: the start model, and a checkpoint's state if one is given.

    A command that is refused leaves the current policy loaded. Its errors are those of `RankWorker.check_load`.

    Attributes:
        run_id: random id of the run; the checkpoint must be of this run.
        incarnation: number of this load, higher than that of any earlier one; with run and version it names the weights.
        model: folder of the start model, from which the architecture is read.
        folder: location of the run's folder.
        checkpoint: location of the checkpoint's folder; None: version 0, the start model.
        version: policy version to load, which the checkpoint must have.
    """

    is_joined = True
    needs_policy = False
    span_name = "loading"
    run_id: str
    incarnation: int
    model: str
    folder: str
    checkpoint: str | None
    version: int

    def prepare(self, rank: "RankWorker") -> None:
        rank.check_load(self)

    def run(self, rank: "RankWorker") -> None:
        rank.load(self)


class TrainStep(Command[StepResult]):
    """Command that trains on the stored batch of a step, once: repeated, it returns the first result.

    Attributes:
        settings: settings that the step is trained under, by name, as {"train.lr": 1e-6}; others are those that the trainer
            was started with.
        stages_rows: False to write neither annotations nor computed log-probabilities.
    """

    is_joined = True
    folder: str
    run_id: str
    step: int
    digest: str
    settings: dict[str, Any] = {}
    stages_rows: bool = True

    def prepare(self, rank: "RankWorker") -> StepResult | None:
        at = rank.progress
        # The flow may have lost the answer of the step: a batch is applied once, however often it is sent.
        if self.run_id == at.run and self.step == at.version - 1 and self.digest == at.digest:
            return at.result
        if self.run_id != at.run or self.step != at.version:
            raise BatchRefusedError(
                f"the trainer is at step {at.version} of run {at.run}, after the batch {at.digest or 'of no step'}; "
                f"requested was step {self.step} of run {self.run_id} with the batch {self.digest}"
            )
        rank.check_settings(self.settings)
        return None

    def run(self, rank: "RankWorker") -> StepResult:
        return rank.train(self)


class ComputeOldLogprobs(Command[StagedRows | None]):
    """Command that computes and stages the trainer's log-probabilities of stored rollouts that a step trains on.

    It is the trainer's current step, or a later one that trains on rollouts of another run. The answer is the staged rows; None if no
    rollout needed computing.

    Attributes:
        step: the step that they are staged for.
        source: location of the run that the rollouts are read from; empty: that of `folder`, where they are stored at `step`.
        source_step: the step they are stored at in `source`.
    """

    span_name = "recomputing"
    folder: str
    run_id: str
    step: int
    trajectory_ids: list[str]
    source: str = ""
    source_step: int = 0

    def prepare(self, rank: "RankWorker") -> None:
        at = rank.progress
        if self.run_id != at.run or self.step < at.version or (self.step > at.version and not self.source):
            raise BatchRefusedError(
                f"the trainer is at step {at.version} of run {at.run}; log-probabilities were requested of step "
                f"{self.step} of run {self.run_id}"
            )

    def run(self, rank: "RankWorker") -> StagedRows | None:
        return rank.compute_old_logprobs(self)


class ComputeLogprobs(Command[list[list[float]]]):
    """Command that returns [B][T-1] log p(token i+1 | tokens 0..i) of given sequences, in nats, at temperature 1."""

    span_name = "parity"
    sequences: list[list[int]]

    def run(self, rank: "RankWorker") -> list[list[float]]:
        return rank.policies.compute_sequences(self.sequences)


class OfferWeights(Command[WeightOffer]):
    """Command that returns layout and address of the weights for servers to receive; they change only with a load."""

    is_local = True

    def run(self, rank: "RankWorker") -> WeightOffer:
        return rank.transfer.offer()


class SendWeights(Command[list[SendResult]]):
    """Command that sends the weights to several servers at once; returns one result for each server, in their order."""

    targets: list[SendTarget]

    def run(self, rank: "RankWorker") -> list[SendResult]:
        try:
            sent = rank.transfer.send(rank.engine, self.targets)
        # Raised on rank 0 alone, after the last collective of the transfer: the others are in the exchange.
        except SyncError:
            rank.timeline.exchange()
            raise
        rank.timeline.exchange()
        return sent

    def progress(self, rank: "RankWorker") -> dict[str, int]:
        return rank.transfer.progress()


class StopSending(Command[None]):
    """Command that ends the transfer to the server with this `SendTarget.prefix`, before or while ranks carry out SendWeights."""

    is_local = True
    prefix: str

    def run(self, rank: "RankWorker") -> None:
        rank.transfer.stop_sending(self.prefix)


class WriteWeights(Command[list[str]]):
    """Command that writes the loaded version into safetensors files in a folder, replacing older ones; returns their paths.

    Attributes:
        folder: a local path, or s3://bucket/prefix.
        snapshot: name under which servers keep the weights; empty: they do not.
        base_snapshot: what all servers hold that read the files, which are then of changes; empty: whole weights are written.
    """

    is_joined = True
    span_name = "exporting"
    folder: str
    version: int
    snapshot: str = ""
    base_snapshot: str = ""

    def prepare(self, rank: "RankWorker") -> list[str] | None:
        rank.check_version(self.version)
        return list_complete_weights(self.folder, self._name(rank)) or None

    def run(self, rank: "RankWorker") -> list[str]:
        return rank.transfer.write(
            rank.engine, self.folder, self._name(rank), self.snapshot, self.base_snapshot
        )

    def _name(self, rank: "RankWorker") -> str:
        """Return the name of the files' folder; whole weights of a version have one name, changes one for each transfer."""
        return (
            f"{rank.weights_name}-{self.snapshot.rpartition('/')[2]}"
            if self.base_snapshot
            else rank.weights_name
        )


class DigestWeights(Command[dict[str, str]]):
    """Command that returns the SHA-256, 64 hex digits, of weight tensors as they are sent to servers, by name.

    Attributes:
        names: names of the tensors, as in the plan of OfferWeights' answer; empty: all tensors.
    """

    span_name = "parity"
    names: list[str] = []

    def run(self, rank: "RankWorker") -> dict[str, str]:
        return rank.transfer.digests(rank.engine, self.names)


class ReportSpans(Command[None]):
    """Command that collects, on rank 0, the spans (timed work and waits) of all ranks since their last report."""

    def run(self, rank: "RankWorker") -> None:
        rank.timeline.exchange()


class BeginCheckpoint(Command[CheckpointBegun]):
    """Command that copies the trainer's state to memory, and begins to write it to RUN/checkpoints in the background."""

    is_joined = True
    folder: str
    version: int

    def prepare(self, rank: "RankWorker") -> CheckpointBegun | None:
        """Answer with `is_new=False` if the checkpoint is complete already; else remove an unfinished one's files."""
        rank.check_version(self.version)
        run = RunFolder(self.folder)
        # A checkpoint that failed unnoticed is reported before the next one hides it.
        rank.writer.check()
        if has_checkpoint(run, self.version):
            return CheckpointBegun(is_new=False, held_s=0.0)
        clear_checkpoint(run, self.version, rank.incarnation)
        return None

    def run(self, rank: "RankWorker") -> CheckpointBegun:
        return rank.begin_checkpoint(RunFolder(self.folder))


class AwaitCheckpoint(Command[CheckpointWritten]):
    """Command that waits until the last begun checkpoint, which must be of `version`, is complete."""

    # On a thread of rank 0: the ranks train on while the checkpoint is written.
    is_local = True
    version: int

    def run(self, rank: "RankWorker") -> CheckpointWritten:
        return rank.writer.wait(self.version)


class ExportPolicy(Command[None]):
    """Command that writes the weights as a Hugging Face model folder at `path`."""

    span_name = "exporting"
    path: str

    def run(self, rank: "RankWorker") -> None:
        rank.export(self.path)


class StorePolicy(Command[str]):
    """Command that writes the loaded version into RUN/policies as a Hugging Face model folder; returns its path."""

    is_joined = True
    span_name = "exporting"
    folder: str
    version: int

    def prepare(self, rank: "RankWorker") -> str | None:
        rank.check_version(self.version)
        run = RunFolder(self.folder)
        return run.path(policy_key(self.version)) if has_policy(run, self.version) else None

    def run(self, rank: "RankWorker") -> str:
        return rank.store_policy(RunFolder(self.folder))


class DigestState(Command[dict[str, str]]):
    """Command that returns the SHA-256, 64 hex digits, of every tensor of weights and moments, by name."""

    span_name = "exporting"

    def run(self, rank: "RankWorker") -> dict[str, str]:
        return rank.digest_state()


class Shutdown(Command[None]):
    """Command that ends the service: every rank stops taking commands."""

    needs_policy = False


AnyCommand: Any = Union[tuple(Command.__subclasses__())]  # noqa: UP007 - of types known at run time
_decoder: msgspec.msgpack.Decoder[Command[Any]] = msgspec.msgpack.Decoder(AnyCommand)


def encode_command(command: Command[Any]) -> bytes:
    """Encode a command as MessagePack, with its name under "type"."""
    return msgspec.msgpack.encode(command)


def decode_command(data: bytes) -> Command[Any]:
    """Decode a command from the MessagePack that `encode_command` made.

    Raises:
        RequestError: there is no such command, or its fields do not fit.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError(f"not a command of this trainer: {error}") from error


def decode_answer(command: Command[Answer], data: msgspec.Raw) -> Answer:
    """Decode a command's answer from MessagePack to the answer type that the command's class declares."""
    (base,) = type(command).__orig_bases__  # type: ignore[attr-defined]  # typing adds it to generic classes
    answer: Answer = msgspec.msgpack.decode(data, type=get_args(base)[0])
    return answer
