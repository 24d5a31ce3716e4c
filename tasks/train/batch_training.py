"""A rank's training on the batch of a step: reads and checks its rows, makes the updates, and reports the result."""

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rollmill.tasks.errors import BatchRefusedError, StoreError
from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.observe.metrics import Metric, MetricTable, Reduced
from rollmill.tasks.observe.process_memory import own_rss_bytes, release_to_system
from rollmill.tasks.observe.spans import span
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import scatter_to_trained
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array
from rollmill.tasks.store.staged_rows import StagedRows, stage_rows
from rollmill.tasks.train.batch_reading import exchange_outlines, read_on_all_ranks, send_rows
from rollmill.tasks.train.checkpoints.trainer_checkpoints import Progress
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.config import TrainConfig, with_settings
from rollmill.tasks.train.engine.deepspeed_engine import Engine, Forward
from rollmill.tasks.train.lr_schedule import learning_rate
from rollmill.tasks.train.objective.losses.token_loss import TokenLoss
from rollmill.tasks.train.objective.normalization import backward_scale, denominator, sum_losses
from rollmill.tasks.train.objective.objective import Objective, build_tokens
from rollmill.tasks.train.objective.token_metrics import add_metrics, token_metrics
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.policy_logprobs import (
    MissingLogprobs,
    PolicyLogprobs,
    StoredLogprobs,
    check_missing_logprobs,
    check_stored_logprobs,
    read_stored_logprobs,
)
from rollmill.tasks.train.rank_messages import gather_messages
from rollmill.tasks.train.samples import Samples, check_lengths, check_samples, read_portion
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import StepRef, TrainStep
from rollmill.tasks.train.service.rank_timeline import RankTimeline, exclusive_seconds, rank_metrics

FIELDS = ("logprobs", "entropy", "ratio", "clipped")


@dataclass(slots=True)
class Annotations:
    """Collects, on one rank, values of each trained token from the first forward pass over each row.

    Later updates and epochs add nothing.

    Attributes:
        seen: the micro-batches' row numbers and [4, N] values of their trained tokens, one of FIELDS after another.
    """

    samples: Samples
    seen: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    _rows: set[int] = field(default_factory=set)

    def add(self, batch: MicroBatch, forward: Forward, loss: TokenLoss) -> None:
        """Keep the token values of one forward pass, unless they are known for its rows.

        The rows of a micro-batch are all new or all known.
        """
        # A second epoch, or a second update, sees a policy that has moved.
        if self._rows.issuperset(batch.row_numbers):
            return
        self._rows.update(batch.row_numbers)
        values = (forward.logprobs, forward.entropies, loss.ratio, loss.clipped)
        self.seen.append((batch.row_numbers, torch.stack([each.detach().float() for each in values])))

    def stage(self, place: StepRef) -> tuple[StagedRows, ...]:
        """Gather the annotations of all ranks and write them to one file, to be stored in the run; a collective.

        Returns a reference to the file on rank 0, and nothing on other ranks or when the step's rows are not to be stored.
        """
        if not place.stages_rows:
            return ()
        own: dict[int, npt.NDArray[np.float32]] = {}
        for numbers, values in self.seen:
            for row, each in self.samples.split_by_row(numbers, values.cpu().numpy()).items():
                # On this rank, since others do not hold the row's mask.
                mask = self.samples.loss_masks[row]
                own[row] = np.stack([scatter_to_trained(mask, of_field) for of_field in each])
        shares = gather_messages(own, dict[int, npt.NDArray[np.float32]])
        if dist.get_rank():
            return ()
        by_row = {row: values for share in shares for row, values in share.items()}
        numbers, schema = sorted(by_row), dataset_schema("annotations")
        columns: dict[str, object] = {
            "run": [place.run] * len(numbers),
            "step": [place.step] * len(numbers),
            "trajectory_id": [self.samples.trajectory_ids[row] for row in numbers],
        }
        for number, field_name in enumerate(FIELDS):
            tokens = [by_row[row][number] for row in numbers]
            # True and False travel as numbers, with the other values of a token.
            if field_name == "clipped":
                tokens = [each == 1.0 for each in tokens]
            columns[field_name] = ragged_array(tokens, schema.field(field_name).type)
        rows, name = make_batch("annotations", columns), f"annotations-step={place.step:06d}"
        return (stage_rows(RunFolder(place.folder), "annotations", rows, name, step=place.step),)


EMPTY_BATCH = "empty batch"
NO_SPREAD = "no spread"
NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_GRADIENT = "non-finite gradient"


def find_skip_reason(samples: Samples, objective: Objective) -> str:
    """Return the reason why a batch makes no update, known before any work; empty when it makes one."""
    (rows,) = samples.split(1)
    if not rows:
        return EMPTY_BATCH
    return "" if objective.is_without_advantage or any(map(samples.has_advantage, rows)) else NO_SPREAD


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Which rows each update of a pass over the batch computes, and on which rank; equal on every rank.

    Attributes:
        kept: rows of each update that is made.
        computed: those of them that go through the model, without rows whose gradient is known to be zero.
        balanced: those of them that have a gradient, whether or not others are annotated.
        dropped: rows of updates that are not made, as all their gradients are zero.
        micro_batches: [updates][W] micro-batches of each rank, as row numbers.
    """

    kept: list[list[int]]
    computed: list[list[int]]
    balanced: list[list[int]]
    dropped: list[int]
    micro_batches: list[list[list[list[int]]]]


def plan_updates(
    config: TrainConfig, engine: Engine, samples: Samples, objective: Objective, *, is_annotated: bool
) -> UpdatePlan:
    """Plan the updates of a pass over the batch from the outlines of its rows; the plan is equal on every rank."""
    parts = samples.split(config.updates_per_step)
    has_gradient = [
        bool(part) and (objective.is_without_advantage or any(map(samples.has_advantage, part)))
        for part in parts
    ]
    kept = list(compress(parts, has_gradient))
    skips = objective.skips_without_advantage
    balanced = [[row for row in part if samples.has_advantage(row) or not skips] for part in kept]
    # Annotations are stored of every row of an update that is made, whether or not it has a gradient.
    computed = kept if is_annotated else balanced
    dropped = [row for part, is_kept in zip(parts, has_gradient, strict=True) if not is_kept for row in part]
    plans = [engine.packer.plan(samples, rows, engine.world_size) for rows in computed]
    return UpdatePlan(kept, computed, balanced, dropped, plans)


class UpdateLoop:
    """Makes the optimizer updates of one batch; every rank has such a loop, over the same rows.

    Every pass over the batch makes the same updates, in the same order; the old policy's log-probabilities are those of
    before the step in all of them.

    Attributes:
        n_updates: optimizer updates made before and during the step, which the learning-rate schedule counts.
        reason: why no update was made; empty when one was.
        table: this rank's part of the metrics.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        samples: Samples,
        n_updates: int,
        objective: Objective,
        annotations: Annotations | None = None,
        plan: UpdatePlan | None = None,
    ) -> None:
        self._config, self._engine, self._samples, self._annotations = config, engine, samples, annotations
        self._objective = objective
        self._plan = plan or plan_updates(
            config, engine, samples, objective, is_annotated=annotations is not None
        )
        self._envs = sorted(set(samples.envs))
        self._is_finite = torch.ones((), dtype=torch.bool, device=engine.device)
        self.n_updates = n_updates
        self.reason = ""
        self.table = MetricTable()

    def run(self) -> None:
        """Make every optimizer update of the step; a collective."""
        started, rank = time.perf_counter(), dist.get_rank()
        # Rows that are not computed count in the denominator too.
        divisors = [
            denominator(self._config, self._samples.n_trained(rows), len(rows)) for rows in self._plan.kept
        ]
        plans = [of_ranks[rank] for of_ranks in self._plan.micro_batches]
        applied = [
            self._update(plan, divisor, epoch=epoch, number=number)
            for epoch in range(self._config.epochs)
            for number, (plan, divisor) in enumerate(zip(plans, divisors, strict=True))
        ]
        with self._engine.phase("measuring"):
            self.reason = "" if any(applied) else self._why_not_finite()
            if rank == 0:
                self._report(time.perf_counter() - started)
            self._report_memory()

    def _update(self, plan: list[list[int]], denominator: int, *, epoch: int, number: int) -> bool:
        scale = backward_scale(denominator, self._engine.world_size)
        for place, rows in enumerate(plan):
            with self._engine.phase("packing"):
                batch = self._engine.packer.micro_batch(self._samples, rows, self._envs)
            with self._engine.phase("forward"):
                forward = self._engine.forward(batch, entropy_gradient=self._objective.entropy_gradient)
                terms = self._objective(batch, forward)
                loss = sum_losses(self._config, terms.total, build_tokens(batch, forward.logprobs)) * scale
                if forward.balance is not None:
                    loss = loss + self._balance_loss(forward.balance, rows, self._plan.balanced[number])
            with self._engine.phase("backward"):
                is_finite = torch.isfinite(loss.detach())
                self._is_finite &= is_finite
                # NaN with a NaN gradient, so that no rank applies the update; a branch on a tensor instead would make the
                # host wait for the device.
                loss = loss * torch.where(is_finite, 1.0, torch.nan)
                self._engine.backward(loss, is_last=place == len(plan) - 1)
            if self._annotations is not None and epoch == 0:
                with self._engine.phase("annotating"):
                    self._annotations.add(batch, forward, terms.policy)
            with self._engine.phase("measuring"):
                mismatch = self._mismatch(batch, forward, epoch, number)
                values = token_metrics(
                    batch, forward, terms, mismatch, is_first=epoch == number == place == 0
                )
                add_metrics(self.table, values, batch.envs, self._envs)
                n_computed = float(batch.token_ids.numel())
                self.table.add("train/padded_tokens", Reduced("value", n_computed))
                self.table.add("train/computed_share", Reduced("mean", n_computed, batch.n_row_tokens))
        return self._apply()

    def _balance_loss(self, balance: torch.Tensor, rows: list[int], balanced: list[int]) -> torch.Tensor:
        """Return a micro-batch's part of the load-balancing loss of an update: the mean over the tokens of all balanced rows.

        Args:
            balance: [M] of each row of the micro-batch.
            rows: [M] their numbers.
            balanced: numbers of the update's rows on all ranks that have a gradient, whether or not others are annotated.
        """
        lengths = {row: self._samples.outline(row).n_tokens for row in balanced}
        weights = torch.tensor([float(lengths.get(row, 0)) for row in rows], device=balance.device)
        total, n_tokens = (balance * weights).sum(), float(weights.sum())
        self.table.add("train/load_balancing_loss", Reduced("mean", float(total.detach()), n_tokens))
        scale = backward_scale(sum(lengths.values()), self._engine.world_size)
        return self._config.router_aux_loss_coef * scale * total

    def _mismatch(self, batch: MicroBatch, forward: Forward, epoch: int, number: int) -> torch.Tensor | None:
        """Compute |log p_trainer - log p_sampler| before the step, [N] nats; None after the policy has changed."""
        if epoch or (number and not self._objective.uses_trainer_logprobs):
            return None
        before = batch.old_logprobs if self._objective.uses_trainer_logprobs else forward.logprobs.detach()
        return (before - batch.sampler_logprobs).abs()

    def _apply(self) -> bool:
        lr = learning_rate(self._config, self.n_updates)
        with self._engine.phase("optimizer"):
            update = self._engine.update(lr)
        # The schedule does not count an update that was dropped.
        self.n_updates += update.updated
        if dist.get_rank() == 0:
            self.table.add("train/gradient_norm", Reduced("mean", update.grad_norm))
            self.table.add("train/learning_rate", Reduced("max", lr))
            self.table.add("train/updates", Reduced("value", float(update.updated)))
            self.table.add("train/skipped_updates", Reduced("value", float(not update.updated)))
        return update.updated

    def _why_not_finite(self) -> str:
        """Return the reason for no update: a loss or a gradient that is not finite on some rank; a collective."""
        on_all_ranks = self._is_finite.int()
        with times.collective():
            dist.all_reduce(on_all_ranks, op=dist.ReduceOp.MIN)
        return NON_FINITE_GRADIENT if on_all_ranks else NON_FINITE_LOSS

    def _report(self, seconds: float) -> None:
        """Add the metrics that every rank knows for the whole step; called on one rank alone."""
        epochs, plan = self._config.epochs, self._plan
        computed = {row for rows in plan.computed for row in rows}
        n_tokens = epochs * sum(self._samples.outline(row).n_tokens for row in computed)
        n_dropped = epochs * self._samples.n_trained(plan.dropped)
        self.table.add("train/tokens_per_s", Reduced("value", n_tokens / seconds))
        self.table.add("train/dropped_tokens", Reduced("value", float(n_dropped)))
        self.table.add("train/layout_varlen", Reduced("max", float(self._engine.packer.layout == "varlen")))
        skipped = [row for part in plan.kept for row in part if row not in computed]
        for env in self._envs:
            rows = [row for row in skipped if self._samples.envs[row] == env]
            self.table.add("train/skipped_rows", Reduced("value", float(epochs * len(rows))), env)
            self.table.add(
                "train/skipped_tokens", Reduced("value", float(epochs * self._samples.n_trained(rows))), env
            )

    def _report_memory(self) -> None:
        """Add metrics of this process's peak memory, and of its memory after freed memory is returned to the system.

        The present memory is a distribution over the ranks, the peak their maximum.
        """
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.table.add("train/peak_rss_bytes", Reduced("max", 1024.0 * peak_kib))
        # What the allocator keeps for later is no memory in use.
        release_to_system()
        rss = float(own_rss_bytes())
        self.table.add("train/rss_bytes", Reduced("distribution", rss, 1.0, rss**2, rss, rss))
        if self._engine.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._engine.device)
            self.table.add("train/peak_device_bytes", Reduced("max", float(peak)))


class BatchTraining:
    """Makes the updates of the batches that a trainer applies; every rank has such an object.

    Args:
        config: settings of training that the trainer was started with.
        timeline: records this rank's spans.
        monitor: of the control API's loop.
    """

    def __init__(self, config: TrainConfig, timeline: RankTimeline, monitor: LoopMonitor) -> None:
        self._started_with, self._timeline, self._monitor = config, timeline, monitor
        self._config, self._objective = config, Objective(config)

    def choose_settings(self, settings: Mapping[str, Any]) -> None:
        """Train later steps under these settings, by name; others are those that the trainer was started with.

        Raises:
            ConfigError: they contradict each other, or there is no such loss; nothing has changed.
        """
        config = with_settings(self._started_with, settings)
        # A loss of another package is imported and tried again only when settings change.
        if config != self._config:
            self._config, self._objective = config, Objective(config)

    def apply(
        self, command: TrainStep, policies: PolicyLogprobs, progress: Progress, incarnation: int
    ) -> tuple[Progress, StepResult]:
        """Read a step's batch and make its updates, if there are any; returns the new progress and the result. A collective.

        Raises:
            BatchRefusedError: the stored batch is another than the requested one, or cannot be trained on; on every rank.
            ShardError: a part of it cannot be read or is not there; on every rank.
            RuntimeError: rank 0 cannot stage rows, and must end, since other ranks train on or the policy has changed.
        """
        self.choose_settings(command.settings)
        policies.engine.choose_settings(self._config)
        samples, held, stored, missing = self._read_on_all_ranks(command, policies.engine)
        table, n_updates, staged = MetricTable(), progress.n_updates, tuple[StagedRows, ...]()
        with span("packing"):
            reason = find_skip_reason(samples, self._objective)
        if reason:
            n_dropped = self._config.epochs * samples.n_trained(range(len(samples.trajectory_ids)))
            _add_once(table, "train/dropped_tokens", n_dropped)
        else:
            place = StepRef(command.folder, command.run_id, command.step, incarnation, command.stages_rows)
            every = self._config.annotate_every
            is_annotated = bool(every) and command.step % every == 0
            with policies.engine.phase("packing"):
                plan = plan_updates(
                    self._config, policies.engine, samples, self._objective, is_annotated=is_annotated
                )
                plans = [*plan.micro_batches, *policies.plan_missing(samples, missing)]
                needed = [
                    {row for of_ranks in plans for rows in of_ranks[rank] for row in rows}
                    for rank in range(policies.engine.world_size)
                ]
            with span("reading_batch"):
                samples, stored = send_rows(samples, held, stored, needed)
            with _failing_to_store():
                samples, staged = policies.complete(samples, stored, missing, place, table)
            annotations = Annotations(samples) if is_annotated else None
            updates = UpdateLoop(
                self._config, policies.engine, samples, n_updates, self._objective, annotations, plan
            )
            updates.run()
            table.join([updates.table])
            n_updates, reason = updates.n_updates, updates.reason
            if annotations is not None:
                with span("annotating"), _failing_to_store():
                    staged = (*staged, *annotations.stage(place))
        _add_once(table, "train/trajectories", len(samples.trajectory_ids))
        metrics, duration_s = self._gather_metrics(table)
        result = StepResult(command.step + 1, not reason, reason, metrics, duration_s, staged)
        return Progress(command.run_id, result.version, command.digest, n_updates, result), result

    def _read_on_all_ranks(
        self, command: TrainStep, engine: Engine
    ) -> tuple[Samples, set[int], StoredLogprobs, MissingLogprobs]:
        """Read and check a portion of a step's batch on each rank. A collective.

        Returns:
            The batch, with the tokens of rows of this rank's portion; their numbers and their stored log-probabilities; and which
            log-probabilities are not stored.
        """
        with span("reading_batch"):
            samples, held, stored = read_on_all_ranks(lambda: self._read_and_check(command, engine))
            samples, missing = exchange_outlines(samples, held, stored)
            check_missing_logprobs(samples, missing, self._config)
        return samples, held, stored, missing

    def _read_and_check(self, command: TrainStep, engine: Engine) -> tuple[Samples, set[int], StoredLogprobs]:
        folder, step, config = command.folder, command.step, self._config
        portion = dist.get_rank(), dist.get_world_size()
        digest, samples, held = read_portion(folder, step, portion, with_routing=config.replay_routing)
        if digest != command.digest:
            raise BatchRefusedError(
                f"step {step}: the stored batch is {digest}, requested was {command.digest}"
            )
        stored = read_stored_logprobs(
            folder, step, [samples.trajectory_ids[row] for row in sorted(held)], config
        )
        check_samples(samples, needs_sampler=self._objective.needs_sampler)
        check_lengths(samples, config.micro_batch_tokens, is_padded=engine.packer.layout == "padded")
        engine.check_routing(samples)
        check_stored_logprobs(samples, stored)
        return samples, held, stored

    def _gather_metrics(self, table: MetricTable) -> tuple[list[Metric], float]:
        """Gather all ranks' metrics; returns them and the step's seconds on rank 0, ([], 0.0) on others. A collective."""
        tables, whole = self._timeline.exchange(table), MetricTable()
        if not tables:
            return [], 0.0
        of_ranks = self._timeline.spans_by_rank()
        whole.join(tables)
        for name, value in rank_metrics(of_ranks):
            whole.add(name, value)
        return [*whole.metrics(), *self._monitor.report()], sum(exclusive_seconds(of_ranks[0]).values())


@contextmanager
def _failing_to_store() -> Iterator[None]:
    """Make a StoreError in the `with` block, which is rank 0's alone, one that ends the trainer: it is restarted, and repeats the step."""
    try:
        yield
    except StoreError as error:
        raise RuntimeError(f"the trainer cannot stage rows of its step: {error}") from error


def _add_once(table: MetricTable, name: str, value: float) -> None:
    """Add a metric of the whole step, whose value every rank knows, to the table of rank 0 alone."""
    # Tables of all ranks are added up, so that a value from each would count W times.
    if dist.get_rank() == 0:
        table.add(name, Reduced("value", float(value)))
