from collections.abc import Callable

import torch

from rollmill.tasks.train.objective.losses.ppo_clip import ppo_clip
from rollmill.tasks.train.objective.losses.reinforce import reinforce
from rollmill.tasks.train.objective.losses.token_loss import Tokens

MakeTokens = Callable[..., Tokens]


def test_the_gradient_is_the_advantage_for_any_ratio(tokens: MakeTokens) -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.1], requires_grad=True)
    given = tokens(logprobs, torch.tensor([-5.0, 0.0, torch.nan]), torch.tensor([0.5, -0.25, 2.0]))
    found = reinforce(given)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)

    assert gradient.tolist() == [-0.5, 0.25, -2.0]
    assert not found.clipped.any()


def test_on_policy_its_gradient_is_that_of_the_clipped_loss(tokens: MakeTokens) -> None:
    logprobs = torch.tensor([-1.0, -3.0, -0.1], requires_grad=True)
    given = tokens(logprobs, logprobs.detach().clone(), torch.tensor([0.5, -0.25, 2.0]))
    losses = (reinforce(given), ppo_clip(given, clip_low=0.2, clip_high=0.2))
    gradients = [torch.autograd.grad(each.loss.sum(), logprobs)[0] for each in losses]

    assert torch.allclose(*gradients)
