"""Losses of another package, good and bad; found by import path, on ranks too."""

import time

import torch
import torch.distributed as dist

from rollmill.tasks.train.objective.losses.token_loss import TokenLoss, Tokens


def signed(tokens: Tokens, *, power: float = 1.0, sides: tuple[str, ...] = ()) -> TokenLoss:
    """REINFORCE of advantages to a power."""
    advantages = tokens.advantages.sign() * tokens.advantages.abs() ** power
    nothing = torch.zeros_like(tokens.advantages)
    return TokenLoss(-advantages * tokens.logprobs, nothing + 1.0, nothing + 1.0, nothing.bool())


def of_some(tokens: Tokens) -> TokenLoss:
    """Fails without a token."""
    return signed(tokens)._replace(weight=tokens.advantages / tokens.advantages.abs().max())


def not_a_number(tokens: Tokens) -> TokenLoss:
    """NaN on the last rank, with a finite gradient."""
    found = signed(tokens)
    is_hit = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    return found._replace(loss=found.loss + (torch.nan if is_hit else 0.0))


def slow(tokens: Tokens, *, seconds: float) -> TokenLoss:
    """Takes so many seconds more on the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
    return signed(tokens)


def without_ratio(tokens: Tokens) -> TokenLoss:
    return signed(tokens)


without_ratio.has_ratio = False  # type: ignore[attr-defined]


def a_number(tokens: Tokens) -> torch.Tensor:
    return signed(tokens).loss


def too_few(tokens: Tokens) -> TokenLoss:
    return TokenLoss(*(each[:1] for each in signed(tokens)))


def detached(tokens: Tokens) -> TokenLoss:
    found = signed(tokens)
    return found._replace(loss=found.loss.detach())


def raises(tokens: Tokens) -> TokenLoss:
    raise KeyError("rows")
