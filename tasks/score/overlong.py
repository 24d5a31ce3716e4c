"""Overlong reward shaping: a soft punishment of answers that come close to their longest length.

DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4, equation 13, with L_max = `score.overlong_limit_tokens`,
L_cache = `score.overlong_cache_tokens` and |y| the tokens of all the trajectory's completions:

    0                                  |y| <= L_max - L_cache
    ((L_max - L_cache) - |y|) / L_cache     L_max - L_cache < |y| <= L_max
    -1                                 L_max < |y|

It is added to the rewards that advantages are taken of, and to nothing that is stored.
"""

import numpy as np

from tasks.score.config import ScoreConfig


def penalties(config: ScoreConfig, n_tokens: np.ndarray) -> np.ndarray:
    """[G] float64, -1 to 0: what lengths add to rewards; 0 without a limit.

    Args:
        config: settings of scoring.
        n_tokens: [G] sampled tokens.

    Example: with a limit of 20 and a cache of 4 tokens, lengths of 16, 17, 20 and 24 give 0, -.25, -1 and -1.
    """
    limit, cache = config.overlong_limit_tokens, config.overlong_cache_tokens
    if not limit:
        return np.zeros(len(n_tokens))
    return np.clip((limit - cache - np.asarray(n_tokens, np.float64)) / cache, -1.0, 0.0)
