"""Rows as a sampler leaves them: prompts of one length, completions of very different ones."""

import numpy as np

N_PROMPT_TOKENS, SIGMA, MEAN_TOKENS, MOST_TOKENS = 64, 0.8, 200.0, 512


def completion_lengths(n_rows: int, seed: int) -> list[int]:
    """[B] lognormal lengths in tokens: mean 200 and sigma 0.8 before those above 512 are cut there."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, n_rows)
    lengths: list[int] = np.clip(drawn.astype(np.int64), 1, MOST_TOKENS).tolist()
    return lengths
