"""One step: a batch becomes one optimizer update or several."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tasks.observe.metrics import MetricTable, Reduced
from tasks.train.annotations import Annotations
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine
from tasks.train.loss import loss_of
from tasks.train.losses.token_loss import TokenLoss, Tokens
from tasks.train.micro_batch import MicroBatch, padded
from tasks.train.normalization import backward_scale, learning_rate, trained_tokens
from tasks.train.packing import pack
from tasks.train.samples import Samples

EMPTY_BATCH = "empty batch"
NO_SPREAD = "no spread"
NON_FINITE_GRADIENT = "non-finite gradient"


def reason_to_skip(samples: Samples) -> str:
    """Why a batch makes no update, known before any work; empty when it does."""
    (rows,) = samples.split(1)
    if not rows:
        return EMPTY_BATCH
    return "" if samples.has_spread(rows) else NO_SPREAD


class StepTraining:
    """Trains one batch; every rank has one, over the same rows.

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
        annotations: Annotations | None = None,
    ) -> None:
        self._config, self._engine, self._samples, self._annotations = config, engine, samples, annotations
        self._loss = loss_of(config)
        self._envs = sorted(set(samples.envs))
        self.n_updates = n_updates
        self.reason = ""
        self.table = MetricTable()
        self._seconds: dict[str, float] = {}

    def run(self) -> None:
        """Make every update of the step; a collective."""
        rank = dist.get_rank()
        with self._timed("pack"):
            parts = self._samples.split(self._config.updates_per_step)
            plans = [self._plan(part, rank) for part in parts if self._samples.has_spread(part)]
            counts = [
                sum(int(self._samples.loss_masks[row].sum()) for rows in plan for row in rows)
                for plan in plans
            ]
            totals = trained_tokens(counts, self._engine.device)
        applied = [
            self._update(plan, total, is_first=i == 0)
            for i, (plan, total) in enumerate(zip(plans, totals, strict=True))
        ]
        self.reason = "" if any(applied) else NON_FINITE_GRADIENT
        for part, seconds in self._seconds.items():
            self.table.add(f"train/{part}_s", Reduced("max", seconds))

    def _plan(self, part: list[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches of one update, as row numbers of the batch."""
        lengths = [len(self._samples.token_ids[row]) for row in part]
        share = pack(lengths, self._engine.world_size, self._config.micro_batch_tokens)[rank]
        return [[part[place] for place in rows] for rows in share]

    def _update(self, plan: list[list[int]], n_tokens: int, *, is_first: bool) -> bool:
        scale = backward_scale(n_tokens, self._engine.world_size)
        for place, rows in enumerate(plan):
            with self._timed("pack"):
                micro_batch = padded(self._samples, rows, self._envs, self._engine.device)
            with self._timed("forward"):
                forward = self._engine.forward(micro_batch)
                loss = self._loss(_tokens(micro_batch, forward.logprobs))
            with self._timed("backward"):
                self._engine.backward(loss.loss.sum() * scale, is_last=place == len(plan) - 1)
            if self._annotations is not None:
                self._annotations.add(micro_batch, forward, loss)
            self._measure(micro_batch, loss, forward.entropies, is_first=is_first and place == 0)
        return self._apply()

    def _apply(self) -> bool:
        lr = learning_rate(self._config.lr, self.n_updates, self._config.warmup_steps)
        with self._timed("optimizer"):
            update = self._engine.update(lr)
        self.n_updates += update.updated
        if dist.get_rank() == 0:
            self.table.add("train/gradient_norm", Reduced("mean", update.grad_norm))
            self.table.add("train/learning_rate", Reduced("max", lr))
            self.table.add("train/updates", Reduced("value", float(update.updated)))
        return update.updated

    @torch.no_grad()
    def _measure(self, rows: MicroBatch, loss: TokenLoss, entropies: torch.Tensor, *, is_first: bool) -> None:
        """Sums by environment.

        The divergence of the sampler's policy from ours is the mean of (r - 1) - log r: k3 of Schulman 2020,
        "Approximating KL Divergence", joschu.net/blog/kl-approx.html. The share of tokens that the weights w are
        worth is (sum w)^2 / (N sum w^2): Kong 1992, "A Note on Importance Sampling using Standardized Weights".
        """
        ratio, weight = loss.ratio.double(), loss.weight.double()
        values = {
            "train/loss": loss.loss.double(),
            "train/clip_fraction": loss.clipped.double(),
            "train/entropy_nats": entropies.double(),
            "train/ratio": ratio,
            "train/kl_nats": ratio - 1.0 - ratio.log(),
        }
        if is_first:
            values["train/first_ratio_deviation"] = (ratio - 1.0).abs()
        counts = self._by_env(torch.ones_like(ratio), rows)
        for name, value in values.items():
            for env, total, count in zip(self._envs, self._by_env(value, rows), counts, strict=True):
                if count:
                    self.table.add(name, Reduced("mean", total, count), env)
        weights = zip(
            self._envs, self._by_env(weight, rows), self._by_env(weight**2, rows), counts, strict=True
        )
        for env, total, squares, count in weights:
            self.table.add("train/effective_share", Reduced("effective", total, count, squares), env)
        for env, count in zip(self._envs, counts, strict=True):
            self.table.add("train/trained_tokens", Reduced("value", count), env)
        self.table.add("train/padded_tokens", Reduced("value", float(rows.token_ids.numel())))

    def _by_env(self, values: torch.Tensor, rows: MicroBatch) -> list[float]:
        sums: list[float] = values.new_zeros(len(self._envs)).index_add_(0, rows.envs, values).tolist()
        return sums

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - started


def _tokens(batch: MicroBatch, logprobs: torch.Tensor) -> Tokens:
    return Tokens(
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        sampler_logprobs=batch.sampler_logprobs,
        advantages=batch.advantages,
        rows=batch.rows,
        n_rows=len(batch.row_numbers),
    )
