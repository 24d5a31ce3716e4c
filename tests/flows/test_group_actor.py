"""An actor's rows beside those of the flow, without Ray: its calls are made in this process."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planned_run import GROUP_SIZE, PlannedSampler, PlannedScoring, open_planned_run

from rollmill.flows.run.executor.actor_messages import ActorStart
from rollmill.flows.run.executor.group_actor import GroupActor
from rollmill.flows.run.executor.ray_executor import RemoteActor
from rollmill.flows.run.live_run import Run
from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.flows.step.step_collection import GroupCollection, StepCollection
from rollmill.flows.step.step_groups import plan_groups
from rollmill.tasks.serve.server_pool import ServerChange
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import no_rows

pytestmark = pytest.mark.slow

GONE = ("RayActorError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError")
RAY = SimpleNamespace(
    exceptions=SimpleNamespace(**{name: type(name, (Exception,), {}) for name in (*GONE, "RayTaskError")})
)


class Handle:
    """A handle of an actor, as Ray gives one."""

    def __init__(self, actor: GroupActor) -> None:
        self.do, self.actor = self, actor

    def remote(self, *arguments: Any) -> "asyncio.Future[bytes]":
        return asyncio.ensure_future(self.actor.do(*arguments))


@contextmanager
def keep_output() -> Iterator[None]:
    """Give this process the output back that an actor sends to its log."""
    kept = [os.dup(1), os.dup(2)]
    try:
        yield
    finally:
        for number, each in enumerate(kept, 1):
            os.dup2(each, number)
            os.close(each)


def start_actor(run: Run, folder: Path) -> RemoteActor:
    store = run.store
    start = ActorStart(
        name="a",
        run=run.id,
        epoch=store.manifest.epoch,
        location=store.folder.absolute,
        model=str(run.model),
        settings=run.config.model_dump_json(),
        slots=GROUP_SIZE,
        path=(),
        cwd=str(Path.cwd()),
        log=str(folder / "actor.log"),
    )
    with keep_output():
        return RemoteActor(RAY, Handle(GroupActor(start)), "a", 0, store)


async def test_changes_of_servers_while_an_actor_opens_come_after_those_that_it_opens_with(
    tmp_path: Path,
) -> None:
    admitted = ServerChange("admit", "http://a", "")
    opening = [admitted, ServerChange("mark_unverified", "http://a", "", "r:1:5")]
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring()) as run:
        actor = start_actor(run, tmp_path)
        opened = asyncio.ensure_future(actor.call("open", opening))
        while not hasattr(actor.handle.actor, "_pool"):  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0)
        await actor.handle.actor.change_servers([admitted])
        await opened
        assert actor.handle.actor._pool.changes == [admitted]
        await actor.call("close", 0)


async def test_scores_of_an_actor_are_read_also_after_the_flow_has_replaced_failed_ones(
    tmp_path: Path,
) -> None:
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring()) as run:
        plan = await plan_groups(run, 0, [0])
        step = StepCollection(run, 0, FailureWatch(0, GROUP_SIZE, 1.0, pytest.fail))
        await GroupCollection(step, plan.groups[0]).collect()
        actor = start_actor(run, tmp_path)
        await actor.call("open", [])
        # As --redo-failed does.
        await run.store.writer.replace("scores", no_rows("scores"), scorer="addition@1", step=0)
        ids = read(run.folder, "rollouts", ["trajectory_id"])["trajectory_id"].to_pylist()
        await actor.call("score", 0, 0, ids)
        stored = read(run.folder, "scores", ["trajectory_id"], scorer="addition@1")["trajectory_id"]
        await actor.call("close", 0)
    assert sorted(stored.to_pylist()) == sorted(ids)
