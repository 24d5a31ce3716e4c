import math
from collections.abc import Callable

import pytest
import torch

from rollmill.tasks.train.objective.losses.gspo import gspo
from rollmill.tasks.train.objective.losses.token_loss import Tokens

MakeTokens = Callable[..., Tokens]
ROWS = [0, 0, 0, 1, 2, 2]


def verl_gspo(
    logprobs: list[torch.Tensor], old: list[torch.Tensor], advantages: list[float], low: float, high: float
) -> torch.Tensor:
    """verl 0.6, trainer/ppo/core_algos.py, compute_policy_loss_gspo with its seq-mean-token-mean, row by row."""
    means = []
    for log_prob, old_log_prob, advantage in zip(logprobs, old, advantages, strict=True):
        negative_approx_kl_seq = (log_prob - old_log_prob).sum() / len(log_prob)
        log_ratio = log_prob - log_prob.detach() + negative_approx_kl_seq.detach()
        ratio = torch.exp(torch.clamp(log_ratio, max=10.0))
        losses = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - low, 1 + high))
        means.append(losses.mean())
    return torch.stack(means).mean()


def test_value_and_gradient_are_verl_s(tokens: MakeTokens) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(6, generator=generator, dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() + 0.3 * torch.randn(6, generator=generator, dtype=torch.float64)
    advantages = [1.5, -2.0, 0.5]
    by_token = torch.tensor([advantages[row] for row in ROWS], dtype=torch.float64)

    given = tokens(logprobs, old, by_token, rows=ROWS)
    ours = given.row_means(gspo(given, clip_low=0.02, clip_high=0.03).loss).mean()
    sizes = [3, 1, 2]
    theirs = verl_gspo(list(logprobs.split(sizes)), list(old.split(sizes)), advantages, 0.02, 0.03)

    assert ours.item() == pytest.approx(theirs.item())
    (our_gradient,) = torch.autograd.grad(ours, logprobs)
    (their_gradient,) = torch.autograd.grad(theirs, logprobs)
    assert torch.allclose(our_gradient, their_gradient)
    assert our_gradient.abs().sum() > 0


def test_a_whole_row_is_clipped_by_the_geometric_mean_of_its_ratios(tokens: MakeTokens) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.5, -1.1, -2.0])
    found = gspo(tokens(logprobs, old, torch.ones(3), rows=[0, 0, 1]), clip_low=0.1, clip_high=0.1)
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)

    assert found.ratio.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), 1.0])
    assert found.clipped.tolist() == [True, True, False]
    assert gradient.tolist() == [0.0, 0.0, -1.0]
