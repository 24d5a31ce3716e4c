import math
from collections.abc import Callable

import pytest
import torch

from rollmill.tasks.train.objective.losses.ppo_clip import ppo_clip
from rollmill.tasks.train.objective.losses.token_loss import Tokens

MakeTokens = Callable[..., Tokens]


def gradient_of(tokens: MakeTokens, ratio: float, advantage: float) -> float:
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = ppo_clip(
        tokens(logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage])),
        clip_low=0.2,
        clip_high=0.28,
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprob)
    assert bool(found.clipped) == (gradient.item() == 0.0 and advantage != 0.0)
    assert found.ratio.item() == pytest.approx(ratio)
    return gradient.item()


def test_gradient_within_the_bounds_is_that_of_the_plain_policy_gradient(tokens: MakeTokens) -> None:
    for ratio in (0.81, 1.0, 1.27):
        for advantage in (-2.0, 2.0):
            assert gradient_of(tokens, ratio, advantage) == pytest.approx(-ratio * advantage)


def test_clip_stops_the_gradient_only_where_the_step_would_go_further(tokens: MakeTokens) -> None:
    assert gradient_of(tokens, 1.29, 2.0) == 0.0
    assert gradient_of(tokens, 0.79, -2.0) == 0.0
    assert gradient_of(tokens, 1.29, -2.0) == pytest.approx(1.29 * 2.0)
    assert gradient_of(tokens, 0.79, 2.0) == pytest.approx(-0.79 * 2.0)


def test_loss_of_a_token_on_policy_is_minus_its_advantage(tokens: MakeTokens) -> None:
    logprobs = torch.tensor([-1.0, -3.0])
    found = ppo_clip(tokens(logprobs, logprobs, torch.tensor([0.5, -0.25])), clip_low=0.2, clip_high=0.28)

    assert found.loss.tolist() == [-0.5, 0.25]
