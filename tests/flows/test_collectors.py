"""Groups of a run shared among collectors, in one process, whose samplers and scorers do as they are told."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pytest
from planned_run import GROUP_SIZE, Act, Diary, PlannedSampler, PlannedScoring, opened
from prefect.logging import disable_run_logger
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from flows.groups.collecting import Collecting
from flows.groups.collector import Collector, Link
from flows.groups.collector_messages import Hello, encoded
from flows.groups.collector_runs import joined as joined_metrics
from flows.groups.collectors import Collectors, port_of
from flows.groups.fan_out import Collected, collect_step, store_batch
from flows.running.run import Run
from tasks.errors import FailedShareError, RequestError
from tasks.observe.spans import Recorder, recording
from tasks.rollout.admission import Admission
from tasks.rollout.sampling import Player, Sampled
from tasks.rollout.trajectory import Work
from tasks.store.reader import read
from tasks.store.verification import verify_run

TOKEN, N_GROUPS, IN_FLIGHT = "secret", 6, 6


class GroupSampler(PlannedSampler):
    """Takes its time; counts what is sampled at once, here and by others, and what was begun."""

    in_flight = most_in_flight = 0
    begun: ClassVar[Counter[str]] = Counter()

    def __init__(self, seconds: float = 0.01, plan: dict[int, Act] | None = None) -> None:
        super().__init__(plan)
        self.seconds = seconds

    async def sample(self, work: Work, token_ids: np.ndarray, until: float) -> Sampled:
        kind = GroupSampler
        kind.begun[work.trajectory_id] += 1
        kind.in_flight += 1
        kind.most_in_flight = max(kind.most_in_flight, kind.in_flight)
        try:
            await asyncio.sleep(self.seconds)
            return await super().sample(work, token_ids, until)
        finally:
            kind.in_flight -= 1


@dataclass
class Worker:
    """A collector, in a task of its own."""

    connection: ClientConnection
    task: asyncio.Task[bool]
    diary: Diary

    def kill(self) -> None:
        """What a kill does: the connection breaks, and nothing more is done."""
        self.connection.transport.abort()
        self.task.cancel()


@asynccontextmanager
async def shared(
    folder: Path, *samplers: PlannedSampler, scoring: Any = None, **rollout: Any
) -> AsyncIterator[tuple[Run, Collectors, Sequence[Worker]]]:
    """A run whose groups are shared among one collector for each sampler."""
    GroupSampler.in_flight = GroupSampler.most_in_flight = 0
    GroupSampler.begun = Counter()
    settings = {
        "groups_per_step": N_GROUPS,
        "max_in_flight": IN_FLIGHT,
        "collectors": len(samplers),
        "collector_start_s": 60.0,
    }
    scoring = scoring or PlannedScoring()
    with disable_run_logger():
        ending = {"stop_grace_s": 0.5}  # a collector's connection here is closed after the run's
        async with opened(folder, GroupSampler(), scoring, rollout=settings | rollout, serve=ending) as run:
            collectors = Collectors(run, TOKEN)
            async with collectors.listen() as server, AsyncExitStack() as stack:
                workers = [
                    await joined(stack, run, port_of(server), each, scoring, number)
                    for number, each in enumerate(samplers, 1)
                ]
                yield run, collectors, workers
                await collectors.end(is_finished=True)
                await asyncio.gather(*(each.task for each in workers), return_exceptions=True)


async def joined(
    stack: AsyncExitStack, run: Run, port: int, sampler: PlannedSampler, scoring: Any, number: int
) -> Worker:
    connection = await stack.enter_async_context(connection_to(port))
    link, diary = Link(connection), Diary()
    player = run.player
    collecting = Collecting(
        id=run.id,
        config=run.config,
        environment=run.environment,
        scoring=scoring,
        player=Player(run.environment, player.tokenizer, sampler, 256, player.timeout_s, 0.1),
        pool=run.pool,
        picture=diary,
        admission=Admission(0),
        writer=run.writer,
    )
    link.send(Hello(f"collector {number}", run.store.manifest.epoch))

    async def work() -> bool:
        with recording(Recorder(f"collector/{number}")):
            return await Collector(link, collecting).work()

    return Worker(connection, asyncio.create_task(work()), diary)


def connection_to(port: int, token: str = TOKEN) -> connect:
    headers = {"Authorization": f"Bearer {token}"}
    return connect(f"ws://127.0.0.1:{port}", additional_headers=headers, proxy=None, max_size=None)


async def collected(run: Run, collectors: Collectors | None) -> Collected:
    found = await collect_step(run, 0, collectors)
    await store_batch(run, found)
    return found


def rows(run: Run, dataset: str, *columns: str) -> pl.DataFrame:
    frame = pl.from_arrow(read(run.folder, dataset, list(columns), step=0))
    assert isinstance(frame, pl.DataFrame)
    return frame.sort(columns)


def check_each_once(run: Run) -> None:
    for dataset in ("rollouts", "scores"):
        there = rows(run, dataset, "group", "sample").rows()
        assert there == [(group, sample) for group in range(N_GROUPS) for sample in range(GROUP_SIZE)]
    assert rows(run, "groups", "group")["group"].to_list() == list(range(N_GROUPS))
    assert not verify_run(run.folder).findings


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.002)


async def test_two_collectors_give_the_rows_that_one_process_gives(tmp_path: Path) -> None:
    columns = "group", "sample", "attempt", "example_id", "sampling_seed", "token_ids", "messages"
    async with shared(tmp_path / "shared", GroupSampler(), GroupSampler()) as (run, collectors, workers):
        of_collectors = await collected(run, collectors)
        check_each_once(run)
        assert all(worker.diary.lines for worker in workers), "a collector had nothing to do"
        assert not run.picture.lines  # type: ignore[attr-defined]
        first = rows(run, "rollouts", *columns)
    async with shared(tmp_path / "alone") as (run, _, _):
        alone = await collected(run, None)
        assert rows(run, "rollouts", *columns).equals(first)
    for here, there in zip(alone.outcomes, of_collectors.outcomes, strict=True):
        assert (here.group, here.advantages.tolist()) == (there.group, there.advantages.tolist())


async def test_collectors_spans_are_stored_as_the_flows_each_group_with_its_lanes(tmp_path: Path) -> None:
    async with shared(tmp_path, GroupSampler(), GroupSampler()) as (run, collectors, _):
        await collected(run, collectors)
        await run.store.spans.store(0)
        spans = rows(run, "spans", "lane", "name", "process", "step")
    samples = [f"{group}.{sample}" for group in range(N_GROUPS) for sample in range(GROUP_SIZE)]
    assert set(spans.filter(pl.col("name") == "environment")["lane"]) >= set(samples)
    groups = spans.filter(pl.col("name") == "sampling")
    assert groups["lane"].to_list() == [str(group) for group in range(N_GROUPS)]
    assert set(groups["process"]) == {"flow"}
    assert set(spans["step"]) == {0}


async def test_it_is_told_how_soon_all_collectors_had_joined_and_how_far_apart(tmp_path: Path) -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        async with shared(tmp_path, GroupSampler(), GroupSampler()) as (run, collectors, _):
            assert not collectors.metrics()
            await collected(run, collectors)
            last, skew = joined_metrics(collectors)
    (booked,) = (each for each in recorder.take() if each.name == "submitting")
    assert booked.lane == "submitting collectors"
    assert (last.name, last.value) == (
        "submit/collectors_last_start_s",
        pytest.approx(1e-9 * booked.duration_ns),
    )
    assert (skew.name, 0.0 < skew.value < last.value) == ("submit/collectors_skew_s", True)


async def test_of_collectors_that_do_not_all_join_those_that_did_are_told_of_at_the_end(
    tmp_path: Path,
) -> None:
    recorder = Recorder("flow")
    with recording(recorder):
        async with shared(tmp_path, GroupSampler(), collectors=2, collector_start_s=2.0) as (
            run,
            collectors,
            _,
        ):
            await collected(run, collectors)
            assert not collectors.metrics()
    assert [each.lane for each in recorder.take() if each.name == "submitting"] == ["submitting collectors"]


async def test_collectors_together_have_no_more_in_flight_than_the_run_allows(tmp_path: Path) -> None:
    async with shared(tmp_path, GroupSampler(), GroupSampler()) as (run, collectors, _):
        await collected(run, collectors)
    assert GroupSampler.most_in_flight == IN_FLIGHT


async def test_a_killed_collectors_groups_go_to_the_other_without_what_is_stored(tmp_path: Path) -> None:
    slow = GroupSampler(plan={3: 30.0})
    async with shared(tmp_path, slow, GroupSampler()) as (run, collectors, workers):
        collecting = asyncio.create_task(collected(run, collectors))
        await until(lambda: read(run.folder, "rollouts", ["group"], step=0).num_rows >= GROUP_SIZE)
        before = set(read(run.folder, "rollouts", ["trajectory_id"], step=0)["trajectory_id"].to_pylist())
        begun = Counter(GroupSampler.begun)
        workers[0].kill()
        await collecting
        check_each_once(run)
        assert [each.name for each in collectors.members] == ["collector 2"]
        again = {each for each in before if GroupSampler.begun[each] > begun[each]}
        assert not again, "what was stored was generated again"


async def test_the_runs_own_process_goes_on_when_no_collector_is_left(tmp_path: Path) -> None:
    async with shared(tmp_path, GroupSampler(plan={3: 30.0})) as (run, collectors, (worker,)):
        collecting = asyncio.create_task(collected(run, collectors))
        await until(lambda: read(run.folder, "rollouts", ["group"], step=0).num_rows >= 1)
        worker.kill()
        await collecting
        check_each_once(run)
        assert "group" in run.picture.lines  # type: ignore[attr-defined]


async def test_it_does_not_wait_for_collectors_for_ever(tmp_path: Path) -> None:
    async with shared(tmp_path, collector_start_s=0.05) as (run, collectors, _):
        await collected(run, collectors)
        check_each_once(run)


async def test_failed_trajectories_of_all_collectors_count_together(tmp_path: Path) -> None:
    failing = [GroupSampler(plan={0: RequestError("no"), 1: RequestError("no")}) for _ in range(2)]
    async with shared(tmp_path, *failing, max_failed_share=0.3) as (run, collectors, _):
        with pytest.raises(ExceptionGroup) as raised:
            await collected(run, collectors)
    assert raised.group_contains(FailedShareError, match=r"of 24 trajectories failed", depth=1)


async def test_a_group_scorer_in_a_collector_sees_the_whole_group(tmp_path: Path) -> None:
    scoring = PlannedScoring(by_group=True)
    async with shared(tmp_path, GroupSampler(), scoring=scoring, trajectories_per_task=1) as (run, all_, _):
        await collected(run, all_)
        check_each_once(run)
    assert scoring.calls == [list(range(GROUP_SIZE))] * N_GROUPS


async def test_refills_are_shared_too(tmp_path: Path) -> None:
    class Flat(PlannedScoring):
        def reward(self, group: int, sample: int) -> float:
            return 0.5 if group == 2 else float(sample)

    async with shared(tmp_path, GroupSampler(), scoring=Flat(), max_refill_groups=2) as (run, all_, _):
        found = await collected(run, all_)
        assert [each.group for each in found.outcomes] == [*range(N_GROUPS), N_GROUPS]
        assert not run.picture.lines  # type: ignore[attr-defined]


async def test_a_collector_ends_when_the_run_is_gone(tmp_path: Path) -> None:
    async with shared(tmp_path, GroupSampler(seconds=30.0)) as (run, collectors, (worker,)):
        collecting = asyncio.create_task(collect_step(run, 0, collectors))
        await until(lambda: bool(GroupSampler.in_flight))
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        for member in collectors.members:
            member.connection.transport.abort()
        with pytest.raises(ConnectionClosed):
            await worker.task
    assert not GroupSampler.in_flight


async def test_who_does_not_show_the_token_does_not_join(tmp_path: Path) -> None:
    async with shared(tmp_path) as (_, collectors, _), collectors.listen() as server:
        with pytest.raises(InvalidStatus, match="401"):
            await connection_to(port_of(server), "another").__aenter__()


async def test_a_collector_of_an_earlier_start_is_sent_away(tmp_path: Path) -> None:
    async with shared(tmp_path) as (run, collectors, _), collectors.listen() as server:
        async with connection_to(port_of(server)) as connection:
            await connection.send(encoded(Hello("late", run.store.manifest.epoch - 1)))
            with pytest.raises(ConnectionClosed, match="another start"):
                await connection.recv()
        assert not collectors.members
