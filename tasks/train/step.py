"""One step: a batch becomes one optimizer update or several."""

import resource
import time

import torch
import torch.distributed as dist

from tasks.observe.memory import own_rss_bytes, release_to_system
from tasks.observe.metrics import MetricTable, Reduced
from tasks.train.annotations import Annotations
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine, Forward
from tasks.train.measures import add_metrics, token_metrics
from tasks.train.micro_batch import MicroBatch
from tasks.train.normalization import backward_scale, denominator, learning_rate, normalized, totals
from tasks.train.objective import Objective, tokens_of
from tasks.train.samples import Samples

EMPTY_BATCH = "empty batch"
NO_SPREAD = "no spread"
NON_FINITE_LOSS = "non-finite loss"
NON_FINITE_GRADIENT = "non-finite gradient"


def reason_to_skip(samples: Samples, objective: Objective) -> str:
    """Why a batch makes no update, known before any work; empty when it does."""
    (rows,) = samples.split(1)
    if not rows:
        return EMPTY_BATCH
    return "" if objective.is_without_advantage or samples.has_spread(rows) else NO_SPREAD


class StepTraining:
    """Trains one batch; every rank has one, over the same rows.

    Every pass over the batch makes the same updates, in the same order; the old policy's log-probabilities are those of
    before the step in all of them.

    Attributes:
        n_updates: optimizer updates made before and during the step: what the learning rate goes by.
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
    ) -> None:
        self._config, self._engine, self._samples, self._annotations = config, engine, samples, annotations
        self._objective = objective
        self._envs = sorted(set(samples.envs))
        self._is_finite = torch.ones((), dtype=torch.bool, device=engine.device)
        self.n_updates = n_updates
        self.reason = ""
        self.table = MetricTable()

    def run(self) -> None:
        """Make every update of the step; a collective."""
        started, rank = time.perf_counter(), dist.get_rank()
        with self._engine.part("packing"):
            parts = self._samples.split(self._config.updates_per_step)
            kept = [part for part in parts if self._has_gradient(part)]
            plans = [self._plan(self._computed(part), rank) for part in kept]
            own = [
                [
                    *(row for rows in plan for row in rows),
                    *self._skipped(part)[rank :: self._engine.world_size],
                ]
                for part, plan in zip(kept, plans, strict=True)
            ]
            counts = [(self._n_trained(rows), len(rows)) for rows in own]
            over_ranks = totals(counts, self._engine.device)
        applied = [
            self._update(plan, denominator(self._config, *total), epoch=epoch, number=number)
            for epoch in range(self._config.epochs)
            for number, (plan, total) in enumerate(zip(plans, over_ranks, strict=True))
        ]
        with self._engine.part("measuring"):
            self.reason = "" if any(applied) else self._why_not_finite()
            if rank == 0:
                dropped = [row for part in parts if not self._has_gradient(part) for row in part]
                n_dropped = self._config.epochs * self._n_trained(dropped)
                self._report(kept, n_dropped, time.perf_counter() - started)
            self._report_memory()

    def _has_gradient(self, part: list[int]) -> bool:
        return bool(part) and (self._objective.is_without_advantage or self._samples.has_spread(part))

    def _computed(self, part: list[int]) -> list[int]:
        """Rows of an update that go through the model: a row without an advantage may have nothing to give."""
        if self._annotations is not None or not self._objective.skips_without_advantage:
            return part
        return [row for row in part if self._samples.advantages[row]]

    def _skipped(self, part: list[int]) -> list[int]:
        return sorted(set(part) - set(self._computed(part)))

    def _n_trained(self, rows: list[int]) -> int:
        return sum(int(self._samples.loss_masks[row].sum()) for row in rows)

    def _plan(self, part: list[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches of one update, as row numbers of the batch."""
        return self._engine.packer.plan(self._samples, part, self._engine.world_size)[rank]

    def _update(self, plan: list[list[int]], denominator: int, *, epoch: int, number: int) -> bool:
        scale = backward_scale(denominator, self._engine.world_size)
        for place, rows in enumerate(plan):
            with self._engine.part("packing"):
                batch = self._engine.packer.micro_batch(self._samples, rows, self._envs)
            with self._engine.part("forward"):
                forward = self._engine.forward(batch, entropy_gradient=self._objective.entropy_gradient)
                terms = self._objective(batch, forward)
                loss = normalized(self._config, terms.total, tokens_of(batch, forward.logprobs)) * scale
            with self._engine.part("backward"):
                self._engine.backward(self._checked(loss), is_last=place == len(plan) - 1)
            if self._annotations is not None and epoch == 0:
                with self._engine.part("annotating"):
                    self._annotations.add(batch, forward, terms.policy)
            with self._engine.part("measuring"):
                mismatch = self._mismatch(batch, forward, epoch, number)
                values = token_metrics(
                    batch, forward, terms, mismatch, is_first=epoch == number == place == 0
                )
                add_metrics(self.table, values, batch.envs, self._envs)
                self.table.add("train/padded_tokens", Reduced("value", float(batch.token_ids.numel())))
        return self._apply()

    def _checked(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss; one that is not finite is NaN with a NaN gradient, so that no rank applies the update."""
        is_finite = torch.isfinite(loss.detach())
        self._is_finite &= is_finite
        return loss * torch.where(is_finite, 1.0, torch.nan)

    def _mismatch(self, batch: MicroBatch, forward: Forward, epoch: int, number: int) -> torch.Tensor | None:
        """[N] nats, |log pi - log mu| of the policy before the step and the sampler; None where that is not known."""
        if epoch or (number and not self._objective.is_recomputed):
            return None
        before = batch.old_logprobs if self._objective.is_recomputed else forward.logprobs.detach()
        return (before - batch.sampler_logprobs).abs()

    def _apply(self) -> bool:
        lr = learning_rate(self._config, self.n_updates)
        with self._engine.part("optimizer"):
            update = self._engine.update(lr)
        self.n_updates += update.updated
        if dist.get_rank() == 0:
            self.table.add("train/gradient_norm", Reduced("mean", update.grad_norm))
            self.table.add("train/learning_rate", Reduced("max", lr))
            self.table.add("train/updates", Reduced("value", float(update.updated)))
            self.table.add("train/skipped_updates", Reduced("value", float(not update.updated)))
        return update.updated

    def _why_not_finite(self) -> str:
        """Which of the two it was, on whatever rank; a collective."""
        on_all_ranks = self._is_finite.int()
        dist.all_reduce(on_all_ranks, op=dist.ReduceOp.MIN)
        return NON_FINITE_GRADIENT if on_all_ranks else NON_FINITE_LOSS

    def _report(self, kept: list[list[int]], n_dropped: int, seconds: float) -> None:
        """What is known of the whole step on every rank, told by one."""
        epochs, computed = self._config.epochs, [row for part in kept for row in self._computed(part)]
        n_tokens = epochs * sum(len(self._samples.token_ids[row]) for row in computed)
        self.table.add("train/tokens_per_s", Reduced("value", n_tokens / seconds))
        self.table.add("train/dropped_tokens", Reduced("value", float(n_dropped)))
        self.table.add("train/layout_varlen", Reduced("max", float(self._engine.packer.layout == "varlen")))
        skipped = [row for part in kept for row in self._skipped(part)]
        for env in self._envs:
            rows = [row for row in skipped if self._samples.envs[row] == env]
            self.table.add("train/skipped_rows", Reduced("value", float(epochs * len(rows))), env)
            self.table.add(
                "train/skipped_tokens", Reduced("value", float(epochs * self._n_trained(rows))), env
            )

    def _report_memory(self) -> None:
        """The most memory that this process has had; the largest of all ranks counts.

        What it has now, once what the step has freed is given back, is told of all ranks.
        """
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.table.add("train/peak_rss_bytes", Reduced("max", 1024.0 * peak_kib))
        release_to_system()
        rss = float(own_rss_bytes())
        self.table.add("train/rss_bytes", Reduced("distribution", rss, 1.0, rss**2, rss, rss))
        if self._engine.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._engine.device)
            self.table.add("train/peak_device_bytes", Reduced("max", float(peak)))
