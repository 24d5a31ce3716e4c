"""Sleeping stubs of what is outside Rollmill: a policy whose answer contains its score's duration, and scorers that sleep for it."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from benchmarks.schedules.latencies import Latencies
from benchmarks.schedules.stopwatch import Stopwatch
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.score.scorer import Candidate, by_group

STOPWATCH: ContextVar[Stopwatch] = ContextVar("stopwatch")
"""That of the run: a scorer is made by its import path, so nobody can hand it one."""

US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class SleepingSampler:
    """Answers after the drawn seconds with a number: the microseconds that scoring this trajectory takes."""

    latencies: Latencies
    tokenizer: ChatTokenizer
    stopwatch: Stopwatch

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        """The whole answer; see Sampler."""
        await self.stopwatch.rollout(self.latencies.rollouts_s[work.group][work.sample])
        score_us = US_PER_S * self.latencies.trajectory_score_s(work.group)
        answer = self.tokenizer.encode_answer(str(round(score_us)))
        return SampledTokens(
            token_ids=answer,
            logprobs=np.zeros(len(answer), np.float32),
            version_spans=((0, 0),),
            finish_reason="stop",
            server="asleep",
        )


async def score_trajectory(candidate: Candidate) -> float:
    """Take the trajectory's seconds."""
    await STOPWATCH.get().score(_seconds(candidate))
    return 1.0


@by_group
async def score_group(candidates: Sequence[Candidate]) -> list[float]:
    """Take the seconds of all of them together."""
    await STOPWATCH.get().score(sum(map(_seconds, candidates)))
    return [1.0] * len(candidates)


def _seconds(candidate: Candidate) -> float:
    return int(candidate.answer) / US_PER_S
