"""Whether a server has the trainer's weights: checksums of tensors, and log-probabilities of known tokens.

Log-probabilities are judged by two statistics. `LogprobDifferences`, between server and trainer at one version, are compared with
those of earlier syncs (`ParityWindow`). `Movement` compares how much an update changed the server's log-probabilities with how much
it changed the trainer's: a server that kept the old weights did not move.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

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


Logprobs = Sequence[Sequence[float] | np.ndarray]
"""Log-probabilities of known tokens in nats: for each sequence of T tokens T-1 values."""


def join_logprobs(logprobs: Logprobs) -> np.ndarray:
    """Join the log-probabilities of all sequences into one array [N] float64, in nats."""
    return np.concatenate([np.zeros(0), *(np.asarray(each, np.float64) for each in logprobs)])


HIGH_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class LogprobDifferences:
    """How far a server's log-probabilities of known tokens are from the trainer's, as absolute differences in nats.

    All are NaN if no token was compared or a log-probability is NaN.

    Attributes:
        mean: over all tokens.
        high: the quantile HIGH_QUANTILE.
        largest: of one token; it has a heavy tail in bfloat16, so nothing is decided by it.
    """

    mean: float = math.nan
    high: float = math.nan
    largest: float = math.nan

    @classmethod
    def measure(cls, expected: Logprobs, found: Logprobs) -> Self:
        """Measure the differences between two scorers of the same sequences.

        Example: [[-1.0, -2.0]] and [[-1.0, -2.5]] differ by 0.25 on average and by 0.5 at most.

        Raises:
            ValueError: they do not have as many tokens.
        """
        each = np.abs(join_logprobs(expected) - join_logprobs(found))
        if not each.size or np.isnan(each).any():
            return cls()
        return cls(float(each.mean()), float(np.quantile(each, HIGH_QUANTILE)), float(each.max()))


NOT_COMPARED = LogprobDifferences()

FLOAT32_LIMITS = LogprobDifferences(2e-5, 1e-4)
"""Accepted in single precision on CPUs, where kernels of trainer and server differ by up to 3e-5 nats."""

START_LIMITS = LogprobDifferences(0.1, 1.0)
"""Accepted in any precision for the start model; servers that compute another function differ by whole nats."""

WINDOW = 64
"""Comparisons that accepted differences follow where kernels round: some steps of several servers."""

# In runs of the quickstart in bfloat16 the largest mean was 3.0 times the median of the syncs before, and the largest quantile, of
# few tokens, 5.1 times.
_MEAN_FACTOR, _HIGH_FACTOR = 5.0, 10.0


class ParityWindow:
    """The differences accepted at a sync: a multiple of the median of recent syncs, at most START_LIMITS; fixed where kernels are exact.

    Args:
        earlier: differences of earlier syncs with correct weights, the oldest first.
    """

    def __init__(self, earlier: Iterable[LogprobDifferences] = ()) -> None:
        self._recent = deque((each for each in earlier if not math.isnan(each.mean)), WINDOW)

    @property
    def limits(self) -> LogprobDifferences:
        """The largest accepted mean and high quantile; `largest` is NaN, since nothing is decided by it."""
        if not self._recent:
            return START_LIMITS
        mean = float(np.median([each.mean for each in self._recent]))
        high = float(np.median([each.high for each in self._recent]))
        # What differs no more than in single precision is never too much, and what the start refuses always.
        return LogprobDifferences(
            float(np.clip(_MEAN_FACTOR * mean, FLOAT32_LIMITS.mean, START_LIMITS.mean)),
            float(np.clip(_HIGH_FACTOR * high, FLOAT32_LIMITS.high, START_LIMITS.high)),
        )

    def accept(self, differences: LogprobDifferences) -> None:
        """Add the differences of a server whose weights are correct, at most those of the limits: an alarm is not the new norm."""
        if not math.isnan(differences.mean):
            limits = self.limits
            clipped = replace(
                differences,
                mean=min(differences.mean, limits.mean),
                high=min(differences.high, limits.high),
            )
            self._recent.append(clipped)

    def find_excess(self, differences: LogprobDifferences, *, is_exact: bool) -> str:
        """Return which statistic is above its limit, as `find_excess` does; `is_exact`: above FLOAT32_LIMITS."""
        return find_excess(differences, FLOAT32_LIMITS if is_exact else self.limits)


def find_excess(differences: LogprobDifferences, limits: LogprobDifferences) -> str:
    """Return which statistic is above its limit, as part of a message; empty if none is. NaN is above every limit."""
    pairs = (
        ("on average", differences.mean, limits.mean),
        (f"at the {HIGH_QUANTILE:.0%} quantile", differences.high, limits.high),
    )
    found = (
        f"its log-probabilities differ from the trainer's by {value:.3g} nats {what}; the limit is {limit:.3g}"
        for what, value, limit in pairs
        # Not `>`, which is false for NaN.
        if not value <= limit
    )
    return next(found, "")


# Fewer tokens that the trainer scores differently say nothing about a server that scores all alike.
_MIN_MOVED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Movement:
    """How far an update moved a server's log-probabilities, as a multiple of the trainer's movement.

    The slope of a regression through the origin of the server's changes on the trainer's, over tokens: near 1 with the new weights,
    near 0 with the old ones. Rounding in the trainer's own changes makes the slope of a correct server smaller ("errors in
    variables": Fuller, Measurement Error Models, 1987, eq. 1.1.8).

    Attributes:
        slope: of the regression.
        error: standard error of the slope.
        expected: slope of a server with the new weights; at most 0 if the update moved less than rounding does.
        n_moved: tokens whose log-probability the update changed in the trainer.
    """

    slope: float
    error: float
    expected: float
    n_moved: int

    @classmethod
    def measure(cls, trainer: tuple[Logprobs, Logprobs], server: tuple[Logprobs, Logprobs]) -> Self | None:
        """Measure the movement from (before, after) of trainer and server; None if the trainer did not move, or with NaN.

        Before the update both had the same weights.
        """
        (before, after), (server_before, server_after) = (
            tuple(map(join_logprobs, pair)) for pair in (trainer, server)
        )
        x, y = after - before, server_after - server_before
        moved = float(x @ x)
        # Also false for NaN.
        if not moved > 0.0 or np.isnan(y).any():
            return None
        slope = float(x @ y) / moved
        rest = y - slope * x
        error = math.sqrt(float(rest @ rest) / max(1, len(x) - 1) / moved)
        noise = server_before - before
        return cls(slope, error, 1.0 - float(noise @ noise) / moved, int(np.count_nonzero(x)))

    @property
    def is_stale(self) -> bool:
        """True if the server moved so little that it has the old weights."""
        if self.n_moved < _MIN_MOVED_TOKENS:
            return False
        # A server that repeats every number has not changed at all, however small the update was.
        repeats = self.slope == 0.0 and self.error == 0.0
        return repeats or self.slope + 2 * self.error < self.expected / 2
