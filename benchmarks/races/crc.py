"""A reward for answers that mean nothing; it needs nothing but itself, since a peer's environment imports it too."""

import zlib

from rollmill.tasks.score.scorer import Candidate


def reward(candidate: Candidate) -> float:
    """Any number from 0 to 1 that goes by the answer, so that a group's rewards differ."""
    return zlib.crc32(candidate.answer.encode()) / 2**32
