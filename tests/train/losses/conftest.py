"""Tokens by hand."""

from collections.abc import Callable

import pytest
import torch

from rollmill.tasks.train.objective.losses.token_loss import Tokens


@pytest.fixture
def tokens() -> Callable[..., Tokens]:
    """Make [N] tokens, of one row unless given otherwise; the old policy is the sampler's unless given."""

    def made(
        logprobs: torch.Tensor,
        sampler_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        old_logprobs: torch.Tensor | None = None,
        rows: list[int] | None = None,
    ) -> Tokens:
        of_rows = torch.tensor(rows or [0] * len(logprobs))
        return Tokens(
            logprobs=logprobs,
            old_logprobs=sampler_logprobs if old_logprobs is None else old_logprobs,
            sampler_logprobs=sampler_logprobs,
            advantages=advantages,
            rows=of_rows,
            n_rows=int(of_rows.max()) + 1,
        )

    return made
