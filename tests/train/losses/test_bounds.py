"""Ratios that are far from 1: what bounds the loss and the gradient of a token."""

import math
from collections.abc import Callable

import pytest
import torch

from rollmill.tasks.train.objective.kl import k3
from rollmill.tasks.train.objective.losses.cispo import cispo
from rollmill.tasks.train.objective.losses.gspo import gspo
from rollmill.tasks.train.objective.losses.ppo_clip import ppo_clip
from rollmill.tasks.train.objective.losses.token_loss import Loss, TokenLoss, Tokens

MakeTokens = Callable[..., Tokens]
LOSSES: dict[str, Loss] = {
    "ppo_clip": lambda tokens: ppo_clip(tokens, clip_low=0.2, clip_high=0.28),
    "dual clip": lambda tokens: ppo_clip(tokens, clip_low=0.2, clip_high=0.28, clip_dual=3.0),
    "cispo": lambda tokens: cispo(tokens, clip_low=1.0, clip_high=4.0),
    "gspo": lambda tokens: gspo(tokens, clip_low=3e-4, clip_high=4e-4),
}


def loss_and_gradient(
    make: MakeTokens, loss: Loss, log_ratio: float, advantage: float
) -> tuple[TokenLoss, float]:
    """Loss of one token and its gradient by the token's log-probability."""
    logprob = torch.tensor([-1.0], requires_grad=True)
    found = loss(make(logprob, torch.tensor([-1.0 - log_ratio]), torch.tensor([advantage])))
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprob)
    return found, gradient.item()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_that_overflows_leaves_loss_and_gradient_finite(
    tokens: MakeTokens, name: str, log_ratio: float, advantage: float
) -> None:
    found, gradient = loss_and_gradient(tokens, LOSSES[name], log_ratio, advantage)

    assert math.isfinite(gradient)
    assert all(torch.isfinite(each).all() for each in found)
    assert found.ratio.item() == pytest.approx(math.exp(math.copysign(20.0, log_ratio)))


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [20.5, 100.0, math.inf, -20.5, -100.0, -math.inf])
@pytest.mark.parametrize("name", ["ppo_clip", "dual clip", "gspo"])
def test_a_token_beyond_the_clamp_counts_as_clipped_and_has_no_gradient(
    tokens: MakeTokens, name: str, log_ratio: float, advantage: float
) -> None:
    found, gradient = loss_and_gradient(tokens, LOSSES[name], log_ratio, advantage)

    assert (found.clipped.item(), found.weight.item(), gradient) == (True, 0.0, 0.0)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_a_token_within_the_clamp_that_no_bound_applies_to_is_not_clipped(
    tokens: MakeTokens, name: str
) -> None:
    found, gradient = loss_and_gradient(tokens, LOSSES[name], 19.5, -2.0)

    assert not found.clipped.item()
    assert gradient == pytest.approx(2.0 * math.exp(19.5))


@pytest.mark.parametrize(("log_ratio", "gradient"), [(25.0, 0.0), (100.0, 0.0), (-100.0, 1.0)])
def test_k3_is_bounded_where_it_would_overflow_only(log_ratio: float, gradient: float) -> None:
    logprob = torch.tensor([-1.0], requires_grad=True)
    divergence = k3(logprob, logprob.detach() + log_ratio)
    (found,) = torch.autograd.grad(divergence.sum(), logprob)

    assert divergence.item() == pytest.approx(math.exp(min(log_ratio, 20.0)) - 1.0 - min(log_ratio, 20.0))
    assert found.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (3.0, -1.0, 3.0, 0.0),
        (8.0, -2.0, 6.0, 0.0),
        (1.0, -1.0, math.e, math.e),
        (-1.0, -1.0, 0.8, 0.0),
        (3.0, 1.0, -1.28, 0.0),
        (-3.0, 1.0, -math.exp(-3.0), -math.exp(-3.0)),
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_negative_advantages_alone(
    tokens: MakeTokens, log_ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    found, slope = loss_and_gradient(tokens, LOSSES["dual clip"], log_ratio, advantage)

    assert (found.loss.item(), slope) == pytest.approx((loss, gradient))
    assert found.clipped.item() == (gradient == 0.0 and advantage != 0.0)
    assert found.weight.item() == (0.0 if found.clipped else found.ratio.item())


def test_the_dual_clip_is_verls(tokens: MakeTokens) -> None:
    """verl 0.6, trainer/ppo/core_algos.py, compute_policy_loss_vanilla with its clip_ratio_c."""
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(3.0 * torch.randn(200, generator=generator))
    advantages = torch.randn(200, generator=generator)
    larger = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    expected = torch.where(advantages < 0, torch.minimum(-advantages * 3.0, larger), larger)

    found = LOSSES["dual clip"](tokens(ratio.log(), torch.zeros(200), advantages))

    assert torch.allclose(found.loss, expected, rtol=1e-5)
    assert (found.loss != LOSSES["ppo_clip"](tokens(ratio.log(), torch.zeros(200), advantages)).loss).any()
