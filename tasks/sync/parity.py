"""How far two policies' log-probabilities of the same tokens are apart, and how far they may be."""

from collections.abc import Sequence

import numpy as np

FLOAT32_THRESHOLD = 1e-4
CALIBRATED_FACTOR = 5.0


def largest_difference(expected: Sequence[Sequence[float]], found: Sequence[np.ndarray]) -> float:
    """The largest |difference| over all tokens of all sequences, in nats; NaN when one is not a number.

    Example: [[-1.0, -2.0]] and [array([-1.0, -2.5])] are 0.5 apart.
    """
    pairs = zip(expected, found, strict=True)
    return max((float(np.max(np.abs(np.asarray(a) - b), initial=0.0)) for a, b in pairs), default=0.0)


def threshold_of(dtype: str, configured: float, at_version_0: Sequence[float]) -> float:
    """Allowed difference in nats: as configured, else 1e-4 for float32, else calibrated.

    Args:
        at_version_0: differences measured there, where both sides have the start model's weights.
    """
    if configured:
        return configured
    if dtype == "float32" or not at_version_0:
        return FLOAT32_THRESHOLD
    return CALIBRATED_FACTOR * float(np.median(at_version_0))
