"""A rank of the trainer: its loaded policy, and the commands on it."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from rollmill.tasks.errors import ConfigError, NothingLoadedError, RequestError
from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.observe.spans import span
from rollmill.tasks.store.checkpoints.checkpoint_store import fetch_checkpoint
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.model_folders import model_folder
from rollmill.tasks.store.staged_rows import StagedRows
from rollmill.tasks.train.batch_reading import read_on_all_ranks
from rollmill.tasks.train.batch_training import BatchTraining
from rollmill.tasks.train.checkpoints.checkpoint_writer import CheckpointWriter
from rollmill.tasks.train.checkpoints.hf_export import export_policy, store_policy
from rollmill.tasks.train.checkpoints.tensor_digests import tensor_digests
from rollmill.tasks.train.checkpoints.trainer_checkpoints import (
    Progress,
    begin_checkpoint,
    read_progress,
    restore_checkpoint,
    seed_random,
)
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine, check_model
from rollmill.tasks.train.engine.reference_policy import FrozenPolicy, load_reference, reference_folder
from rollmill.tasks.train.policy_logprobs import PolicyLogprobs, list_policy_logprobs
from rollmill.tasks.train.rank_messages import all_gather_messages
from rollmill.tasks.train.samples import read_rollouts
from rollmill.tasks.train.service.answers import CheckpointBegun, StepResult
from rollmill.tasks.train.service.commands import Command, ComputeOldLogprobs, LoadPolicy, StepRef, TrainStep
from rollmill.tasks.train.service.rank_timeline import RankTimeline
from rollmill.tasks.train.service.ranks import is_first_on_machine
from rollmill.tasks.train.setting_rules import check_offload
from rollmill.tasks.train.weight_transfer import WeightTransfer


class RankWorker:
    """One rank of the trainer: holds the loaded policy and carries out commands.

    `prepare` is called on rank 0 alone, before a command is passed on; `run` is called on every rank, with the same
    commands in the same order.

    Args:
        config: settings of training.
        transfer: sends the policy's weights.
        writer: writes checkpoints in the background.
        monitor: watches the event loop that serves the control API; a step's metrics report what it measured.
        timeline: records this rank's spans.

    Attributes:
        progress: run and version of the loaded policy; version -1 before the first load.
        incarnation: the run's count of trainer loads at the last load.
        device: where this rank computes, as given.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        transfer: WeightTransfer,
        writer: CheckpointWriter,
        monitor: LoopMonitor,
        timeline: RankTimeline,
    ) -> None:
        self.progress = Progress(run="", version=-1)
        self.incarnation = -1
        self.transfer, self.writer, self.timeline = transfer, writer, timeline
        self._config, self.device = config, device
        self._training = BatchTraining(config, timeline, monitor)
        self._policies: PolicyLogprobs | None = None
        self._frozen: FrozenPolicy | None = None

    @property
    def policies(self) -> PolicyLogprobs:
        """Log-probabilities under the loaded policy and its reference; RuntimeError before the first load."""
        if self._policies is None:
            raise RuntimeError("a command that needs a policy reached this rank before the first load")
        return self._policies

    @property
    def engine(self) -> Engine:
        """Engine with the loaded policy; RuntimeError before the first load."""
        return self.policies.engine

    @property
    def weights_name(self) -> str:
        """Name of the current weights in files: "INCARNATION-VERSION", the version with six digits."""
        return f"{self.incarnation}-{self.progress.version:06d}"

    def prepare(self, command: Command[Any]) -> Any:
        """Check a command on rank 0; returns the answer if no rank needs to run, else None.

        Raises:
            RollmillError: the command is refused, and nothing has changed.
        """
        if command.needs_policy and self._policies is None:
            raise NothingLoadedError(
                f"{command.name}: the trainer has nothing loaded; send it load_policy first"
            )
        return command.prepare(self)

    def run(self, command: Command[Any]) -> Any:
        """Carry out this rank's part of a command; rank 0's return value is the answer.

        Raises:
            RollmillError: the command failed, on rank 0 alone, and every rank is ready for the next one. Any
                other error ends this rank.
        """
        # Every rank forgets earlier collectives at the same command, so that their lists match.
        times.begin()
        with span(command.span_name) if command.span_name else nullcontext():
            return command.run(self)

    @contextmanager
    def attribute_to_step(self, command: Command[Any], taken_ns: int = 0) -> Iterator[None]:
        """Record the spans of the `with` block under the step of a command.

        Args:
            command: the command that the block carries out.
            taken_ns: when rank 0 took the command, in nanoseconds since 1970; 0 if this rank has not waited for it.
        """
        own: int | None = getattr(command, "step", None)
        of_version = -1 if isinstance(command, LoadPolicy) else self.progress.version - 1
        with self.timeline.command(of_version if own is None else own, taken_ns):
            yield

    def check_version(self, version: int) -> None:
        """Raise RequestError unless `version` is the loaded one."""
        if version != self.progress.version:
            raise RequestError(f"the trainer is at version {self.progress.version}, not {version}")

    def check_load(self, command: LoadPolicy) -> None:
        """Refuse a model or a checkpoint that cannot be loaded; the policy that is loaded stays.

        Raises:
            ConfigError: a model folder is missing, or settings do not fit the model.
            StoreError: the checkpoint is incomplete, or of another run or version.
        """
        # Before the current policy is closed: a wrong command must not make the trainer lose it.
        for field, model in (("model", command.model), ("train.kl.model", self._config.kl.model)):
            if model and not (model_folder(model) / "config.json").is_file():
                remedy = f"there is no model folder (config.json and weights) at {model_folder(model)}"
                raise ConfigError(field, model, remedy)
        check_offload(self._config, self.device.type)
        check_model(self._config, command.model)
        # The checkpoint to load may be the one that is being written.
        self.writer.join()
        if command.checkpoint is not None:
            stored = fetch_checkpoint(command.checkpoint)
            read_progress(stored, command.run_id, command.version, reads_bytes=True)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError if no step can be trained under these settings, by name."""
        self._training.choose_settings(settings)

    def load(self, command: LoadPolicy) -> None:
        """Load the command's model, and its checkpoint's state if it has one, in place of the current policy; a collective."""
        self.writer.join()
        self._close_old(command.model)
        # A resumed run draws the same numbers as one that was never stopped.
        seed_random()
        engine = Engine.load(self._config, command.model, self.device)
        progress = Progress(run=command.run_id, version=command.version)
        if command.checkpoint is not None:
            # One rank of each machine downloads; the others read its copy after the barrier.
            if is_first_on_machine():
                fetch_checkpoint(command.checkpoint)
            with times.collective():
                dist.barrier()
            folder = RunFolder(command.checkpoint).local
            progress = read_progress(folder, command.run_id, command.version)
            restore_checkpoint(engine, folder, dist.get_rank())
        self.progress, self.incarnation = progress, command.incarnation
        reference = load_reference(self._config, engine, command.model, self._frozen)
        self._frozen = reference if isinstance(reference, FrozenPolicy) else None
        self._policies = PolicyLogprobs(self._config, engine, reference)
        self.transfer.prepare(engine)

    def _close_old(self, start_model: str) -> None:
        """Free the current policy, and its frozen reference unless it is that of a policy with this start model."""
        if self._policies is None:
            return
        self.engine.close()
        if self._frozen is not None and self._frozen.folder != reference_folder(self._config, start_model):
            self._frozen.close()
            self._frozen = None
        # They refer to the old weights, which must be freed before the new ones are read: both may not fit.
        self._policies = None
        # Model, engine and optimizer refer to each other, so only the collector frees them.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def train(self, command: TrainStep) -> StepResult:
        """Train on a step's stored batch, which brings the trainer to the next version; a collective."""
        training, incarnation = self._training, self.incarnation
        self.progress, result = training.apply(command, self.policies, self.progress, incarnation)
        if self.engine.model.device.type == "cuda":
            # What training needed and frees, a server on the same GPU takes when it wakes.
            torch.cuda.empty_cache()
        return result

    def compute_old_logprobs(self, command: ComputeOldLogprobs) -> StagedRows | None:
        """Compute and stage log-probabilities of stored rollouts that have none yet; a collective, None but on rank 0."""
        folder, step, with_routing = command.folder, command.step, self._config.replay_routing

        def list_new() -> list[str]:
            stored = list_policy_logprobs(folder, step, "trainer")
            return [each for each in command.trajectory_ids if each not in stored]

        # Rank 0's list, on all ranks: another one may list later, when more rows are stored.
        new = all_gather_messages(read_on_all_ranks(list_new), list[str])[0]
        origin = (command.source, command.source_step) if command.source else (folder, step)
        samples = read_on_all_ranks(lambda: read_rollouts(*origin, new, with_routing=with_routing))
        place = StepRef(folder, command.run_id, step, self.incarnation)
        return self.policies.compute_old(samples, place, self.progress.version)

    def begin_checkpoint(self, run: RunFolder) -> CheckpointBegun:
        """Copy this rank's state, and begin to write the copy; a collective."""
        with span("checkpointing") as copying:
            self.writer.begin(
                begin_checkpoint(self.engine, self._config, self.progress, run, self.incarnation)
            )
        self.timeline.exchange()
        return CheckpointBegun(is_new=True, held_s=copying.duration_s)

    def export(self, folder: str) -> None:
        """Write a Hugging Face model folder; a collective."""
        export_policy(self.engine.model, folder, is_writer=dist.get_rank() == 0)

    def store_policy(self, run: RunFolder) -> str:
        """Write the loaded version into a run's policies; a collective, returns the path on rank 0, "" on the others."""
        version, is_writer = self.progress.version, dist.get_rank() == 0
        return store_policy(self.engine.model, run, version, self.incarnation, is_writer=is_writer)

    def digest_state(self) -> dict[str, str]:
        """Return the SHA-256, 64 hex digits, of all weights and moments, by name; a collective, complete on rank 0 alone."""
        return tensor_digests(self.engine)
