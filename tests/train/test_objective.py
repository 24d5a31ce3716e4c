"""What is minimized for a token, against formulas written out."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.tasks.errors import BatchRefusedError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Forward
from rollmill.tasks.train.objective.kl import KL_ESTIMATORS
from rollmill.tasks.train.objective.objective import Objective
from rollmill.tasks.train.objective.token_metrics import token_metrics
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.setting_rules import HAS_RATIO

SAMPLER = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
OLD = torch.tensor([-1.1, -1.2, -0.6, -3.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.9, -2.5, -0.5, -1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)


def micro_batch(**columns: Any) -> MicroBatch:
    """Rows of three tokens and one."""
    return replace(
        MicroBatch(
            row_numbers=[0, 1],
            token_ids=torch.zeros(2, 4),
            packed=None,
            places=[np.arange(4), np.arange(4, 8)],
            n_row_tokens=8,
            positions=torch.arange(4),
            rows=torch.tensor([0, 0, 0, 1]),
            targets=torch.zeros(4),
            temperatures=torch.ones(4),
            sampler_logprobs=SAMPLER,
            old_logprobs=SAMPLER,
            reference_logprobs=REFERENCE,
            advantages=ADVANTAGES,
            envs=torch.zeros(4, dtype=torch.int64),
            routing=None,
        ),
        **columns,
    )


def forward(logprobs: torch.Tensor | None = None) -> Forward:
    values = SAMPLER + torch.tensor([0.0, 1.0, -2.0, 0.1], dtype=torch.float64)
    return Forward(
        (values if logprobs is None else logprobs).requires_grad_(), torch.arange(1.0, 5.0).double()
    )


def objective(**settings: Any) -> Objective:
    return Objective(TrainConfig.model_validate({"loss": "reinforce"} | settings))


def gradient_of(what: Objective, batch: MicroBatch, said: Forward) -> list[float]:
    (gradient,) = torch.autograd.grad(what(batch, said).total.sum(), said.logprobs)
    return gradient.tolist()


def test_the_estimators_of_the_divergence_are_schulmans() -> None:
    """trl 0.24 grpo_trainer.py and verl 0.6 kl_penalty have the same three."""
    x = (SAMPLER - REFERENCE).numpy()
    by_hand = {"k1": x, "k2": 0.5 * x**2, "k3": np.exp(-x) - (-x) - 1.0}

    for name, values in by_hand.items():
        assert KL_ESTIMATORS[name](SAMPLER, REFERENCE).tolist() == pytest.approx(values.tolist())


def test_a_rank_without_a_token_needs_no_loss_of_none_and_has_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss of a user may take a maximum, which no tokens have."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    none = torch.empty(0, dtype=torch.float64)
    batch = micro_batch(
        row_numbers=[],
        rows=none.long(),
        sampler_logprobs=none,
        old_logprobs=none,
        reference_logprobs=none,
        advantages=none,
        envs=none.long(),
    )
    said = Forward(none.clone().requires_grad_(), none)
    terms = objective(loss="planted_losses:of_some")(batch, said)
    assert [each.shape for each in terms.policy] == [(0,)] * 4
    terms.total.sum().backward()
    assert said.logprobs.grad is not None


@pytest.mark.parametrize(("name", "direction"), [("k1", "none"), ("k2", "reverse"), ("k3", "forward")])
def test_the_gradient_in_expectation_is_the_one_that_is_documented(name: str, direction: str) -> None:
    """Over a policy of three answers, each weighted by its own probability, as its samples are."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    divergences = {
        "none": 0.0 * log_p.sum(),
        "reverse": (log_p.exp() * (log_p - reference)).sum(),
        "forward": (reference.exp() * (reference - log_p)).sum(),
    }
    sampled = (log_p.exp().detach() * KL_ESTIMATORS[name](log_p, reference)).sum()

    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(divergences[direction], logits)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_a_divergence_in_the_loss_is_added_with_its_gradient() -> None:
    said = forward()
    what = objective(kl={"coef": 0.5, "estimator": "k2", "reference": "frozen"})
    log_ratio = (said.logprobs - REFERENCE).detach()

    expected = -ADVANTAGES * said.logprobs.detach() + 0.5 * 0.5 * log_ratio**2
    assert torch.allclose(what(micro_batch(), said).total.detach(), expected)
    assert gradient_of(what, micro_batch(), said) == pytest.approx((-ADVANTAGES + 0.5 * log_ratio).tolist())


def test_a_divergence_in_the_advantage_is_subtracted_without_a_gradient() -> None:
    said = forward()
    kl = {"coef": 0.5, "estimator": "k1", "reference": "frozen", "apply_to": "advantage"}
    log_ratio = (said.logprobs - REFERENCE).detach()

    found = gradient_of(objective(kl=kl), micro_batch(), said)
    assert found == pytest.approx((-(ADVANTAGES - 0.5 * log_ratio)).tolist())


def test_a_divergence_without_reference_log_probabilities_is_refused() -> None:
    what = objective(kl={"coef": 0.5, "reference": "frozen"})
    assert what.needs_reference
    with pytest.raises(BatchRefusedError, match="no reference log-probabilities"):
        what(micro_batch(reference_logprobs=None), forward())


def test_the_entropy_is_subtracted_from_the_loss() -> None:
    said, what = forward(), objective(entropy_coef=0.25)
    plain = objective()(micro_batch(), said).total

    assert what.entropy_gradient
    assert not objective().entropy_gradient
    assert (plain - what(micro_batch(), said).total).tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0])


def weights_of(said: Forward, batch: MicroBatch, **settings: Any) -> list[float]:
    return objective(**settings)(batch, said).correction.weight.tolist()


RATIOS = [1.0, math.exp(1.0), math.exp(-2.0), math.exp(0.1)]


def test_weights_are_trained_policy_over_sampler_truncated_at_the_cap() -> None:
    weights = weights_of(forward(), micro_batch(), importance={"mode": "truncated"})
    assert weights == pytest.approx([1.0, 2.0, RATIOS[2], RATIOS[3]])


def test_masked_tokens_are_outside_the_bounds_and_have_no_gradient() -> None:
    """IcePop, Ling Team 2025, equation 4: M(k) = k for alpha <= k <= beta, else 0."""
    masked = {"mode": "masked", "bounds": (0.5, 2.0)}
    said, what = forward(), objective(importance=masked)

    assert weights_of(said, micro_batch(), importance=masked) == pytest.approx([1.0, 0.0, 0.0, RATIOS[3]])
    assert what(micro_batch(), said).correction.masked.tolist() == [False, True, True, False]
    assert gradient_of(what, micro_batch(), said) == pytest.approx([-1.0, 0.0, 0.0, 2.0 * RATIOS[3]])


def test_a_loss_with_the_ratio_to_the_sampler_does_not_count_it_twice() -> None:
    masked = {"mode": "masked", "bounds": (0.5, 2.0)}
    assert weights_of(forward(), micro_batch(), loss="ppo_clip", importance=masked) == [1.0, 0.0, 0.0, 1.0]


def test_the_weight_of_a_whole_row_is_the_product_of_its_ratios() -> None:
    truncated = {"mode": "truncated", "level": "sequence", "bounds": (0.0, 1.05)}
    whole = math.exp(0.0 + 1.0 - 2.0)
    assert weights_of(forward(), micro_batch(), importance=truncated) == pytest.approx([whole] * 3 + [1.05])


def test_the_weight_of_a_whole_row_can_be_the_geometric_mean_of_its_ratios() -> None:
    truncated = {"mode": "truncated", "level": "sequence_mean", "bounds": (0.0, 1.05)}
    mean = math.exp((0.0 + 1.0 - 2.0) / 3.0)
    assert weights_of(forward(), micro_batch(), importance=truncated) == pytest.approx([mean] * 3 + [1.05])


def test_a_row_whose_ratio_overflows_is_truncated_or_masked_and_never_nan() -> None:
    far = forward(SAMPLER + 1000.0)
    for mode, expected in (("truncated", 2.0), ("masked", 0.0)):
        importance = {"mode": mode, "level": "sequence"}
        assert weights_of(far, micro_batch(), importance=importance) == [expected] * 4


def test_with_a_recomputed_behaviour_the_ratio_is_against_it_and_the_weight_makes_up_for_the_sampler() -> (
    None
):
    """Yao et al. 2025: min(pi_old / mu, C) min(r A, clip(r) A), r against pi_old."""
    said, batch = forward(), micro_batch(old_logprobs=OLD)
    settings = {"loss": "ppo_clip", "old_logprobs": "trainer", "importance": {"mode": "truncated"}}
    terms = objective(**settings)(batch, said)
    ratio = torch.exp(said.logprobs.detach() - OLD)
    clipped = torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.8, 1.28) * ADVANTAGES)
    weight = torch.exp(OLD - SAMPLER).clamp(max=2.0)

    assert torch.allclose(terms.total.detach(), -weight * clipped)
    assert terms.correction.weight.tolist() == pytest.approx(weight.tolist())


@pytest.mark.parametrize(
    ("settings", "needs_sampler"),
    [
        ({}, False),
        ({"loss": "ppo_clip"}, True),
        ({"loss": "ppo_clip", "old_logprobs": "trainer"}, False),
        ({"importance": {"mode": "truncated"}}, True),
    ],
)
def test_tokens_without_the_samplers_log_probability_are_trained_on_where_nothing_needs_it(
    settings: dict[str, Any], needs_sampler: bool
) -> None:
    what = objective(**settings)
    unknown = torch.full_like(SAMPLER, torch.nan)
    old = OLD if what.uses_trainer_logprobs else unknown
    total = what(micro_batch(sampler_logprobs=unknown, old_logprobs=old), forward()).total

    assert what.needs_sampler is needs_sampler
    assert bool(torch.isfinite(total).all()) is not needs_sampler


@pytest.mark.parametrize("mode", ["none", "truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("loss", HAS_RATIO)
def test_a_row_without_an_advantage_has_no_gradient_in_any_built_in_loss(
    loss: str, level: str, mode: str
) -> None:
    advantages = torch.tensor([0.0, 0.0, 0.0, -2.0], dtype=torch.float64)
    importance = {"mode": mode, "level": level, "bounds": (0.0, 100.0)}
    # Neither gspo nor cispo takes the bounds of ppo_clip, or gspo the mean over tokens.
    bounds = {"clip_low": 0.1, "normalization": "sequence"}
    what = objective(loss=loss, old_logprobs="trainer", importance=importance, **bounds)
    batch = micro_batch(advantages=advantages, old_logprobs=OLD)

    assert what.skips_without_advantage
    *without, last = gradient_of(what, batch, forward())
    assert without == [0.0, 0.0, 0.0]
    assert last != 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"kl": {"coef": 0.1, "reference": "frozen"}},
        {"kl": {"coef": 0.1, "reference": "frozen", "apply_to": "advantage"}},
        {"entropy_coef": 0.1},
    ],
)
def test_rows_without_an_advantage_are_computed_where_something_else_has_a_gradient(
    settings: dict[str, Any],
) -> None:
    assert not objective(**settings).skips_without_advantage


def test_the_divergence_that_is_measured_is_by_token_when_the_ratio_is_an_answers() -> None:
    said = forward()
    batch = micro_batch(old_logprobs=OLD)
    terms = objective(loss="gspo", clip_high=4e-4, normalization="sequence", old_logprobs="trainer")(
        batch, said
    )
    found = token_metrics(batch, said, terms, None, is_first=False)["train/kl_nats"]

    log_ratio = (said.logprobs.detach() - OLD).numpy()
    assert found.tolist() == pytest.approx((np.exp(log_ratio) - 1.0 - log_ratio).tolist())
