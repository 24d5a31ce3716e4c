"""What a rank does when it is told to: the state of the trainer, and one method a command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tasks.errors import BatchRefusedError, ConfigError, RequestError, SyncError
from tasks.observe.loop import LoopMonitor
from tasks.observe.spans import span
from tasks.store.checkpoints import clear_checkpoint, fetch_checkpoint, is_complete, local_checkpoint
from tasks.store.deliveries import Delivery
from tasks.store.layout import RunFolder, policy_key
from tasks.store.policies import has_policy
from tasks.store.routing import read_routing
from tasks.store.weights import whole_weights
from tasks.sync.order import Sent, Target
from tasks.train.batch_training import BatchTraining, Loaded
from tasks.train.checkpoint_writer import CheckpointWriter
from tasks.train.checkpoints import Progress, begin_checkpoint, read_progress, restore_checkpoint
from tasks.train.config import TrainConfig
from tasks.train.digests import tensor_digests
from tasks.train.engine import Engine
from tasks.train.model_check import check_model
from tasks.train.other_policies import OtherPolicies, stored_logprobs
from tasks.train.process_group import is_first_here
from tasks.train.protocol import (
    Checkpoint,
    CheckpointBegun,
    Command,
    Digests,
    ExportPolicy,
    Load,
    Logprobs,
    ScoreRows,
    Send,
    StepResult,
    StorePolicy,
    TellSpans,
    TrainStep,
    WeightDigests,
    WriteWeights,
)
from tasks.train.random_state import begin_random
from tasks.train.reference import FrozenPolicy, load_reference
from tasks.train.rules import check_offload
from tasks.train.samples import read_rollouts
from tasks.train.scoring import sequence_logprobs
from tasks.train.step_place import StepPlace
from tasks.train.timeline import Timeline
from tasks.train.transfer import Transfer
from tasks.train.weights import export_policy, store_policy


class Worker:
    """One rank's part of the trainer.

    `prepare` is asked on rank 0 alone, before a command is passed on; `run` is called on every rank, with the same
    commands in the same order.

    Attributes:
        engine: None before the first load.
        progress: where the trainer stands.
        incarnation: the run's counter at the last load.
        writer: writes its checkpoints, beside the commands.

    Args:
        monitor: of the loop that serves the control API, where this rank has it; a step's metrics have what it saw.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        transfer: Transfer,
        writer: CheckpointWriter,
        monitor: LoopMonitor,
        timeline: Timeline,
    ) -> None:
        self.engine: Engine | None = None
        self.progress = Progress(run="", version=-1)
        self.incarnation = -1
        self.writer = writer
        self._config, self._device, self._transfer = config, device, transfer
        self._timeline = timeline
        self._training = BatchTraining(config, timeline, monitor)
        self._others: OtherPolicies | None = None
        self._copy: FrozenPolicy | None = None
        self._methods: dict[str, Callable[[Any], Any]] = {
            Load.name: self._load,
            TrainStep.name: self._train_step,
            ScoreRows.name: self._score_rows,
            Logprobs.name: self._logprobs,
            Send.name: self._send,
            WriteWeights.name: self._write_weights,
            WeightDigests.name: lambda command: self._transfer.digests(self._loaded, command.names),
            Checkpoint.name: self._checkpoint,
            ExportPolicy.name: self._export_policy,
            StorePolicy.name: self._store_policy,
            Digests.name: lambda _: tensor_digests(self._loaded),
            TellSpans.name: lambda _: self._timeline.exchange(None) and None,
        }

    def prepare(self, command: Command) -> Any:
        """Check a command on rank 0; what it returns, unless None, is the result and no rank has to run.

        Raises:
            RollmillError: the command is refused, and nothing has changed.
        """
        if isinstance(command, Load):
            self._check_load(command)
        elif self.engine is None:
            raise RequestError(f"{command.name}: the trainer has nothing loaded; send it `load` first")
        elif isinstance(command, TrainStep):
            return self._prepare_step(command)
        elif isinstance(command, ScoreRows):
            self._prepare_scoring(command)
        elif isinstance(command, WriteWeights):
            return self._prepare_files(command)
        elif isinstance(command, Checkpoint):
            return self._prepare_checkpoint(command)
        elif isinstance(command, StorePolicy):
            return self._prepare_policy(command)
        return None

    def run(self, command: Command) -> Any:
        """Carry out a command; rank 0's result counts.

        Raises:
            RollmillError: the command failed, on rank 0 alone, and every rank is ready for the next one. Any
                other error is the end of this rank.
        """
        self._timeline.begin()
        with span(command.owner) if command.owner else nullcontext():
            return self._methods[command.name](command)

    @contextmanager
    def asked(self, command: Command, taken_ns: int = 0) -> Iterator[None]:
        """Book what goes on inside to the step that a command is for; `taken_ns` as in Timeline.command."""
        own: int | None = getattr(command, "step", None)
        of_version = -1 if isinstance(command, Load) else self.progress.version - 1
        with self._timeline.command(of_version if own is None else own, taken_ns):
            yield

    def _check_load(self, command: Load) -> None:
        for field, folder in (("model", command.model), ("train.kl.model", self._config.kl.model)):
            if folder and not (Path(folder) / "config.json").is_file():
                remedy = "there is no model folder (config.json and weights) at this path"
                raise ConfigError(field, folder, remedy)
        check_offload(self._config, self._device.type)
        check_model(self._config, command.model)
        self.writer.join()
        if command.checkpoint is not None:
            read_progress(fetch_checkpoint(command.checkpoint), command.run, command.version)

    def _load(self, command: Load) -> None:
        self.writer.join()
        if self.engine is not None:
            self.engine.close()
            self.engine = self._others = None  # both hold its weights
        begin_random()
        engine = Engine.load(self._config, command.model, self._device)
        progress = Progress(run=command.run, version=command.version)
        if command.checkpoint is not None:
            folder = self._on_this_machine(command.checkpoint)
            progress = read_progress(folder, command.run, command.version)
            restore_checkpoint(engine, folder, dist.get_rank())
        self.engine, self.progress, self.incarnation = engine, progress, command.incarnation
        reference = load_reference(self._config, engine, command.model, self._copy)
        self._copy = reference if isinstance(reference, FrozenPolicy) else None
        self._others = OtherPolicies(self._config, engine, reference)
        self._transfer.prepare(engine)

    def _prepare_step(self, command: TrainStep) -> StepResult | None:
        at = self.progress
        if command.run == at.run and command.step == at.version - 1 and command.digest == at.digest:
            return at.result
        if command.run != at.run or command.step != at.version:
            raise BatchRefusedError(
                f"the trainer stands at step {at.version} of run {at.run}, after the batch {at.digest or 'of no step'}; "
                f"asked was step {command.step} of run {command.run} with the batch {command.digest}"
            )
        return None

    def _train_step(self, command: TrainStep) -> StepResult:
        place = self._place(command, hands_over=command.hands_over)
        loaded = Loaded(self._loaded, self._other_policies, self.progress)
        batch = self._training.checked_rows(command, self._loaded)
        self.progress, result = self._training.train(command, batch, loaded, place)
        return result

    def _place(self, command: TrainStep | ScoreRows, *, hands_over: bool = True) -> StepPlace:
        return StepPlace(command.folder, command.run, command.step, self.incarnation, hands_over)

    def _prepare_scoring(self, command: ScoreRows) -> None:
        at = self.progress
        if command.run != at.run or command.step != at.version:
            raise BatchRefusedError(
                f"the trainer stands at step {at.version} of run {at.run}; log-probabilities were asked for of step "
                f"{command.step} of run {command.run}"
            )

    def _score_rows(self, command: ScoreRows) -> Delivery | None:
        stored = stored_logprobs(command.folder, command.step, "trainer")
        new = [each for each in command.trajectory_ids if each not in stored]
        samples = read_rollouts(command.folder, command.step, new)
        if self._config.replay_routing:
            routing = read_routing(RunFolder(command.folder), command.step, new)
            samples = replace(samples, routing=routing)
        return self._other_policies.score(samples, self._place(command))

    def _logprobs(self, command: Logprobs) -> list[list[float]]:
        return sequence_logprobs(self._loaded, command.sequences)

    def _send(self, command: Send) -> list[Sent]:
        try:
            sent = self._transfer.send(self._loaded, [Target.from_json(each) for each in command.targets])
        except SyncError:  # of rank 0, after what all ranks do together
            self._timeline.exchange(None)
            raise
        self._timeline.exchange(None)
        return sent

    def _prepare_files(self, command: WriteWeights) -> list[str] | None:
        self._check_version(command.version)
        return whole_weights(command.folder, self._files_name) or None

    def _write_weights(self, command: WriteWeights) -> list[str]:
        return self._transfer.write(self._loaded, command.folder, self._files_name)

    @property
    def _files_name(self) -> str:
        """Names the weights that the trainer has now: of one version, as one load came to it."""
        return f"{self.incarnation}-{self.progress.version:06d}"

    def _prepare_checkpoint(self, command: Checkpoint) -> CheckpointBegun | None:
        self._check_version(command.version)
        run = RunFolder(command.folder)
        self.writer.check()
        if is_complete(run, command.version):
            return CheckpointBegun(is_new=False, held_s=0.0)
        clear_checkpoint(run, command.version, self.incarnation)
        return None

    def _checkpoint(self, command: Checkpoint) -> CheckpointBegun:
        run = RunFolder(command.folder)
        with span("checkpointing") as copying:
            self.writer.begin(
                begin_checkpoint(self._loaded, self._config, self.progress, run, self.incarnation)
            )
        self._timeline.exchange(None)
        return CheckpointBegun(is_new=True, held_s=copying.duration_s)

    def _export_policy(self, command: ExportPolicy) -> None:
        export_policy(self._loaded.model, command.path, is_writer=self._is_first)

    def _prepare_policy(self, command: StorePolicy) -> str | None:
        self._check_version(command.version)
        run = RunFolder(command.folder)
        return run.path(policy_key(command.version)) if has_policy(run, command.version) else None

    def _store_policy(self, command: StorePolicy) -> str:
        run = RunFolder(command.folder)
        return store_policy(
            self._loaded.model, run, command.version, self.incarnation, is_writer=self._is_first
        )

    def _check_version(self, version: int) -> None:
        if version != self.progress.version:
            raise RequestError(f"the trainer stands at version {self.progress.version}, not {version}")

    def _on_this_machine(self, checkpoint: str) -> Path:
        """The folder of a checkpoint; one rank of each machine fetches it, unless it is there."""
        if is_first_here():
            fetch_checkpoint(checkpoint)
        dist.barrier()
        return local_checkpoint(checkpoint)

    @property
    def _is_first(self) -> bool:
        return dist.get_rank() == 0

    @property
    def _other_policies(self) -> OtherPolicies:
        if self._others is None:
            raise RuntimeError("a command that needs a loaded model reached this rank before `load`")
        return self._others

    @property
    def _loaded(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("a command that needs a loaded model reached this rank before `load`")
        return self.engine
