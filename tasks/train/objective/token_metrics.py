"""Metrics of trained tokens, by environment: loss, ratios, divergences, entropy, clipping."""

from collections.abc import Mapping, Sequence

import torch

from rollmill.tasks.observe.metrics import MetricTable, Reduced
from rollmill.tasks.train.engine.deepspeed_engine import Forward
from rollmill.tasks.train.objective.kl import k3
from rollmill.tasks.train.objective.objective import ObjectiveTerms
from rollmill.tasks.train.packing.micro_batch import MicroBatch

_NOT_KNOWN_IS_NAN = frozenset(
    {
        "train/ratio",
        "train/first_ratio_deviation",
        "train/kl_nats",
        "train/kl_sampler_nats",
        "train/mismatch_nats",
    }
)
"""Metrics over those tokens alone whose sampler's log-probability is known."""


@torch.no_grad()
def token_metrics(
    batch: MicroBatch,
    forward: Forward,
    terms: ObjectiveTerms,
    mismatch: torch.Tensor | None,
    *,
    is_first: bool,
) -> dict[str, torch.Tensor]:
    """Return [N] float64 values of each metric of a micro-batch's trained tokens.

    A divergence of a token is

        r - 1 - log r

    with r = p_policy / p_old for kl_nats, p_policy / p_sampler for kl_sampler_nats and p_reference / p_policy for
    kl_reference_nats, whichever ratio the loss uses: k3 of Schulman 2020, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html.

    Args:
        batch: the micro-batch.
        forward: the policy's output.
        terms: terms of the objective for these tokens.
        mismatch: [N] nats, |log pi - log mu| of the trainer's policy before the step and the sampler; None when it is
            not known of this micro-batch.
        is_first: True for the first micro-batch of a rank in a step.
    """
    ratio, logprobs = terms.policy.ratio.double(), forward.logprobs.double()
    values = {
        "train/loss": terms.total,
        "train/advantage": batch.advantages,
        "train/clip_fraction": terms.policy.clipped,
        "train/entropy_nats": forward.entropies,
        "train/ratio": ratio,
        "train/kl_nats": k3(batch.old_logprobs.double(), logprobs),
        "train/kl_sampler_nats": k3(batch.sampler_logprobs.double(), logprobs),
        "train/importance_weight": terms.correction.weight,
        "train/masked_tokens": terms.correction.masked,
        "train/effective_share": terms.policy.weight * terms.correction.weight,
    }
    if batch.reference_logprobs is not None:
        values["train/kl_reference_nats"] = k3(logprobs, batch.reference_logprobs.double())
    if mismatch is not None:
        values["train/mismatch_nats"] = mismatch
    if is_first:
        values["train/first_ratio_deviation"] = (ratio - 1.0).abs()
    return {name: value.double() for name, value in values.items()}


@torch.no_grad()
def add_metrics(
    table: MetricTable, values: Mapping[str, torch.Tensor], envs: torch.Tensor, names: Sequence[str]
) -> None:
    """Reduce [N] values of each metric by environment, and add them and the number of tokens to a table.

    Tokens whose sampler's log-probability is not known are left out of the metrics that need it. The values are copied from the
    device once.

    Args:
        table: this rank's table.
        values: [N] float64 by name of the metric.
        envs: [N] int64, index into `names`.
        names: names of the environments.
    """
    # One reduction of all metrics, so that the host waits for the device once.
    stacked = torch.stack(list(values.values()))
    optional = torch.tensor([name in _NOT_KNOWN_IS_NAN for name in values], device=stacked.device)
    known = ~(stacked.isnan() & optional.unsqueeze(1))
    present = stacked.masked_fill(~known, 0.0)
    shape, places = (len(values), len(names)), envs.expand(len(values), -1)
    sums = torch.stack(
        [
            stacked.new_zeros(shape).index_add_(1, envs, known.double()),
            stacked.new_zeros(shape).index_add_(1, envs, present),
            stacked.new_zeros(shape).index_add_(1, envs, present**2),
            _extremes(stacked.masked_fill(~known, torch.inf), places, shape, "amin"),
            _extremes(stacked.masked_fill(~known, -torch.inf), places, shape, "amax"),
        ],
        dim=2,
    ).tolist()
    for name, by_env in zip(values, sums, strict=True):
        for env, (count, total, squares, least, most) in zip(names, by_env, strict=True):
            if count:
                table.add(name, _reduce(name, count, total, squares, least, most), env)
    for env, (count, *_) in zip(names, sums[0], strict=True):
        table.add("train/trained_tokens", Reduced("value", count), env)


def _extremes(
    values: torch.Tensor, places: torch.Tensor, shape: tuple[int, int], reduce: str
) -> torch.Tensor:
    start = values.new_full(shape, torch.inf if reduce == "amin" else -torch.inf)
    return start.scatter_reduce(1, places, values, reduce)


def _reduce(name: str, count: float, total: float, squares: float, least: float, most: float) -> Reduced:
    """Reduce one metric's values in one environment to a total, mean, effective share or distribution, by its name.

    The effective share of tokens with weights w is (sum w)^2 / (N sum w^2): Kong 1992, "A Note on Importance Sampling
    using Standardized Weights".

    Args:
        name: name of the metric.
        count: number of values.
        total: sum of the values.
        squares: sum of their squares.
        least: smallest value.
        most: largest value.
    """
    if name == "train/effective_share":
        return Reduced("effective", total, count, squares)
    if name == "train/masked_tokens":
        return Reduced("value", total)
    if name in ("train/clip_fraction", "train/first_ratio_deviation"):
        return Reduced("mean", total, count)
    return Reduced("distribution", total, count, squares, least, most)
