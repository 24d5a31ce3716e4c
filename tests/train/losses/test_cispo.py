import math
from collections.abc import Callable

import pytest
import torch

from rollmill.tasks.train.objective.losses.cispo import cispo
from rollmill.tasks.train.objective.losses.ppo_clip import ppo_clip
from rollmill.tasks.train.objective.losses.token_loss import Tokens

MakeTokens = Callable[..., Tokens]


def gradient_of(tokens: MakeTokens, ratio: float, advantage: float) -> float:
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    given = tokens(logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage]))
    found = cispo(given, clip_low=1.0, clip_high=1.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprob)
    assert bool(found.clipped) == (ratio > 2.0)
    assert found.ratio.item() == pytest.approx(ratio)
    return gradient.item()


@pytest.mark.parametrize("advantage", [-2.0, 0.5])
def test_gradient_is_weighted_by_the_ratio_up_to_the_cap_and_never_stops(
    tokens: MakeTokens, advantage: float
) -> None:
    for ratio in (1e-3, 0.5, 1.0, 1.99):
        assert gradient_of(tokens, ratio, advantage) == pytest.approx(-ratio * advantage)
    for ratio in (2.01, 50.0):
        assert gradient_of(tokens, ratio, advantage) == pytest.approx(-2.0 * advantage)


def test_weighted_rows_of_another_policy_give_the_gradient_under_the_current_policy(
    tokens: MakeTokens,
) -> None:
    """A policy over three answers: the mean over mu's samples is the sum over pi's probabilities."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    sampler = torch.log_softmax(torch.tensor([1.0, 0.5, -0.2], dtype=torch.float64), 0)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    expected = (torch.softmax(logits, 0) * rewards).sum()
    (wanted,) = torch.autograd.grad(-expected, logits)

    given = tokens(torch.log_softmax(logits, 0), sampler, rewards)
    found = cispo(given, clip_low=1.0, clip_high=math.inf)
    (gradient,) = torch.autograd.grad((sampler.exp() * found.loss).sum(), logits)

    assert torch.allclose(gradient, wanted)


def test_on_policy_its_gradient_is_that_of_the_clipped_loss(tokens: MakeTokens) -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.1], requires_grad=True)
    given = tokens(logprobs, logprobs.detach().clone(), torch.tensor([0.5, -0.25, 2.0]))
    losses = (cispo(given, clip_low=1.0, clip_high=1.0), ppo_clip(given, clip_low=0.2, clip_high=0.28))
    gradients = [torch.autograd.grad(each.loss.sum(), logprobs)[0] for each in losses]

    assert torch.allclose(*gradients)
