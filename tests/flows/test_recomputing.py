"""What is handed to a trainer while it waits, and when it is left alone; the trainer is a list of what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rollmill.flows.run.rollout_logprobs import LogprobRecomputation
from rollmill.tasks.errors import RequestError


class Trainer:
    """Scores a bundle when it is let; fails on a trajectory called `wrong`."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[str]]] = []
        self.may_continue = asyncio.Event()
        self.may_continue.set()

    async def score(self, step: int, ids: Sequence[str]) -> None:
        self.asked.append((step, list(ids)))
        await self.may_continue.wait()
        if "wrong" in ids:
            raise RequestError("no")


@asynccontextmanager
async def run_worker(recomputing: LogprobRecomputation) -> AsyncIterator[Trainer]:
    trainer = Trainer()
    task = asyncio.create_task(recomputing.work(trainer.score))
    try:
        yield trainer
    finally:
        task.cancel()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def recomputing() -> LogprobRecomputation:
    return LogprobRecomputation(bundle_rows=2)


async def test_bundles_go_out_at_the_trainers_step_alone(recomputing: LogprobRecomputation) -> None:
    async with run_worker(recomputing) as trainer:
        recomputing.add(0, ["a", "b", "c"])
        recomputing.add(1, ["d"])
        await settle()
        assert not trainer.asked
        recomputing.begin(0)
        await settle()
        assert trainer.asked == [(0, ["a", "b"]), (0, ["c"])]
        recomputing.add(0, ["e"])
        await settle()
        await recomputing.end()
        recomputing.add(0, ["late"])
        recomputing.begin(1)
        await settle()
    assert trainer.asked[2:] == [(0, ["e"]), (1, ["d"])]


async def test_a_step_that_is_due_waits_for_one_bundle(recomputing: LogprobRecomputation) -> None:
    async with run_worker(recomputing) as trainer:
        trainer.may_continue.clear()
        recomputing.begin(0)
        recomputing.add(0, ["a", "b", "c", "d"])
        await settle()
        ending = asyncio.create_task(recomputing.end())
        await settle()
        assert not ending.done()
        trainer.may_continue.set()
        assert await ending > 0.0
        await settle()
    assert trainer.asked == [(0, ["a", "b"])]
    assert recomputing.hidden_s > 0.0


async def test_a_bundle_that_fails_is_left_to_the_step(recomputing: LogprobRecomputation) -> None:
    async with run_worker(recomputing) as trainer:
        recomputing.begin(0)
        recomputing.add(0, ["wrong", "b", "c"])
        await settle()
    assert trainer.asked == [(0, ["wrong", "b"]), (0, ["c"])]
    assert recomputing.n_failed == 1
