"""How far two policies' log-probabilities of the same tokens are apart, and how far they may be."""

from collections.abc import Sequence

import numpy as np

FLOAT32_THRESHOLD = 1e-4
CALIBRATED_FACTOR = 5.0


def largest_difference(expected: Sequence[Sequence[float]], found: Sequence[np.ndarray]) -> float:
    """The largest |difference| over all tokens of all sequences, in nats; NaN when one is not a number.

    Example: [[-1.0, -2.0]] and [array([-1.0, -2.5])] are 0.5 apart.
    """
    each = (np.abs(np.subtract(ours, theirs)) for ours, theirs in zip(expected, found, strict=True))
    return float(np.max(np.concatenate([[0.0], *each])))


def threshold_of(dtype: str, configured: float, at_version_0: Sequence[float]) -> float:
    """Allowed difference in nats: as configured, else 1e-4 for float32, else calibrated.

    Args:
        dtype: of the served weights.
        configured: nats; 0: not configured.
        at_version_0: differences measured there, where both sides have the start model's weights.
    """
    if configured:
        return configured
    if dtype == "float32" or not at_version_0:
        return FLOAT32_THRESHOLD
    return CALIBRATED_FACTOR * float(np.median(at_version_0))
