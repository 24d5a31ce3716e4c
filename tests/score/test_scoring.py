"""Scoring off the event loop: whatever a scorer does is a row."""

import time
from datetime import UTC, datetime

import numpy as np

from tasks.rollout.environment import Example, Message
from tasks.rollout.trajectory import Trajectory, Work, rollout_rows
from tasks.score.scorer import Candidate, Reward
from tasks.score.scoring import score_off_loop
from tasks.store.rows import Rows, values


class Slow:
    name, version = "slow", "1"

    def score(self, candidate: Candidate) -> Reward:
        time.sleep(0.5)
        return Reward(1.0)


class Broken:
    name, version = "broken", "1"

    def score(self, candidate: Candidate) -> Reward:
        raise KeyError("answer")


def rollouts() -> Rows:
    ids = np.array([6, 9, 1], np.int32)
    trajectory = Trajectory(
        work=Work("r.0.0.0", 0, 0, 0, Example("1+1", {"answer": "2"}), 0, 1.0),
        status="complete",
        messages=(Message("user", "1+1="), Message("assistant", "2")),
        token_ids=ids,
        loss_mask=ids == 1,
        logprobs=np.zeros(3, np.float32),
        version_spans=((2, 0),),
        finish_reason="stop",
        turns=1,
        server="",
        started_at=datetime.now(UTC),
        duration_s=0.0,
        generate_s=0.0,
        environment_s=0.0,
        queue_s=0.0,
    )
    return rollout_rows("r", 0, "addition", [trajectory])


async def test_a_scorer_that_takes_too_long_is_a_failed_row_that_names_the_setting() -> None:
    scored = await score_off_loop(None, Slow(), "r", 0, rollouts(), timeout_s=0.05)
    assert values(scored, "status") == ["failed"]
    assert "score.timeout_s = 0.05" in str(values(scored, "error")[0])


async def test_a_scorer_that_raises_is_a_failed_row_with_its_error() -> None:
    scored = await score_off_loop(None, Broken(), "r", 0, rollouts(), timeout_s=10.0)
    assert (values(scored, "status"), values(scored, "error_type")) == (["failed"], ["KeyError"])
