"""A worker of user code that allocates more than its limit fails by itself; the machine's memory is not taken."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollmill.tasks.errors import ForeignError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment_pool import WORKER_COMMAND
from rollmill.tasks.score.call_slots import CallSlots
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.score_worker_pool import ScoreWorkerPool
from rollmill.tasks.score.scorer import CandidateText
from rollmill.tasks.user_code.worker_process import WorkerProcess

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0


@pytest.fixture(autouse=True)
def _planted() -> Iterator[None]:
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def candidate(answer: str) -> CandidateText:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return CandidateText("t", "e", "complete", '{"prompt": "?", "data": {}}', json.dumps(messages), "{}", 1)


async def score(path: str, answers: Sequence[str]) -> list[tuple[float | None, str]]:
    """Score answers in one worker: (reward, type of the error) of each."""
    load = CallSlots("score", 1)
    settings = ScoreConfig().model_dump_json().encode()
    async with ScoreWorkerPool([(path, {})], settings, 1, TIMEOUT_S, load) as pool, load.slot():
        found = await pool.call(0, [[candidate(answer)] for answer in answers], TIMEOUT_S)
    return [(verdict.reward, verdict.error_type) for (verdict,) in found]


async def test_answer_that_takes_too_much_memory_is_a_failed_score_and_the_next_is_scored() -> None:
    found = await score("planted_memory:allocate", ["5", "0"])
    assert [error for _, error in found] == ["MemoryError", ""]
    assert found[1][0] == 0.0


async def test_process_that_a_scorer_starts_has_the_limit_too() -> None:
    assert await score("planted_memory:allocate_in_child", ["5", "0"]) == [(1.0, ""), (0.0, "")]


async def test_environment_that_takes_too_much_memory_is_an_error() -> None:
    settings = RolloutConfig(environment="planted_memory:Greedy").model_dump_json().encode()
    worker = await WorkerProcess.start("worker", WORKER_COMMAND, settings, log=None, stop_grace_s=1.0)
    with pytest.raises(ForeignError) as raised:
        await worker.wait_until_ready(TIMEOUT_S)
    assert "MemoryError" in str(raised.value)
    await worker.stop()
