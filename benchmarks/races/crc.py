"""A reward for answers that mean nothing; it needs nothing but itself, since a peer's environment imports it too."""

import zlib

from rollmill.tasks.score.scorer import Candidate


def reward(candidate: Candidate) -> float:
    """Return a number from 0 to 1 that depends on the answer, so that a group's rewards differ."""
    return zlib.crc32(candidate.answer.encode()) / 2**32
