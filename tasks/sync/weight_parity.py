"""Whether a server has the trainer's weights: checksums of tensors, and log-probabilities of known tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from rollmill.tasks.errors import ChecksumError


def select_names(names: Sequence[str], version: int, n: int) -> tuple[str, ...]:
    """Select the tensors whose checksums are compared at a version, a different `n` of them at each.

    ceil(len(names) / n) versions in a row cover all tensors.

    Example: of 5 tensors 2 at a time, version 0 has the first two, version 1 the next, version 2 the last and the first.

    Args:
        names: of all tensors, always in the same order.
        version: number of the policy version.
        n: tensors to compare; 0: none.
    """
    first = version * n
    return tuple(names[(first + i) % len(names)] for i in range(min(n, len(names))))


def find_differing_names(sent: Mapping[str, str], arrived: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of tensors whose checksums differ; a tensor without a checksum on arrival differs."""
    return tuple(name for name, digest in sent.items() if arrived.get(name) != digest)


def compare_checksums(server: str, version: str, sent: Mapping[str, str], arrived: Mapping[str, str]) -> None:
    """Raise ChecksumError, which names every tensor that differs, unless a server's tensors have the trainer's checksums.

    Args:
        server: its address.
        version: name of the weights.
        sent: SHA-256 by tensor, from the trainer.
        arrived: SHA-256 by tensor, from the server; a tensor that is missing differs.
    """
    if differing := find_differing_names(sent, arrived):
        raise ChecksumError(server, version, differing)


# Nats; kernels of trainer and server differ by up to 3e-5 in single precision.
FLOAT32_THRESHOLD = 1e-4
# For other types, the allowed difference is this factor of the difference at version 0, where weights are equal.
CALIBRATED_FACTOR = 5.0


def largest_difference(expected: Sequence[Sequence[float]], found: Sequence[np.ndarray]) -> float:
    """Compute the largest |difference| over all tokens of all sequences, in nats; NaN if any value is NaN.

    Example: [[-1.0, -2.0]] and [array([-1.0, -2.5])] are 0.5 apart.
    """
    each = (np.abs(np.subtract(one, other)) for one, other in zip(expected, found, strict=True))
    return float(np.max(np.concatenate([[0.0], *each])))


def choose_threshold(dtype: str, configured: float, at_version_0: Sequence[float]) -> float:
    """Choose the allowed difference of log-probabilities in nats: the configured one, else 1e-4 for float32, else calibrated.

    Calibrated is 5 times the median difference at version 0; without measurements it is 1e-4 too.

    Args:
        dtype: of the served weights.
        configured: nats; 0: not configured.
        at_version_0: differences measured at version 0, where trainer and servers have the start model.
    """
    if configured:
        return configured
    if dtype == "float32" or not at_version_0:
        return FLOAT32_THRESHOLD
    return CALIBRATED_FACTOR * float(np.median(at_version_0))
