"""Rows to score, and planted scorers where an import path finds them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest, Turn, rollout_rows
from rollmill.tasks.store.rows import Rows


@pytest.fixture(autouse=True)
def planted() -> Iterator[None]:
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def rollouts() -> Callable[[Sequence[str]], Rows]:
    """One complete trajectory of group 5 for each answer."""

    def rows(answers: Sequence[str]) -> Rows:
        return rollout_rows("r", 3, "addition", [trajectory(i, answer) for i, answer in enumerate(answers)])

    return rows


def trajectory(sample: int, answer: str) -> Trajectory:
    ids = np.array([6, 9, 1], np.int32)
    return Trajectory(
        work=TrajectoryRequest(f"r.5.{sample}.0", 5, sample, 0, Example("1+1", {"answer": "2"}), 0, 1.0),
        status="complete",
        messages=(Message("user", "1+1="), Message("assistant", answer)),
        token_ids=ids,
        loss_mask=ids == 1,
        logprobs=np.zeros(3, np.float32),
        version_spans=((2, 0),),
        finish_reason="stop",
        turns=(Turn(2, 1, 1),),
        server="",
        started_at=datetime.now(UTC),
        duration_s=0.0,
        generate_s=0.0,
        environment_s=0.0,
        queue_s=0.0,
    )
