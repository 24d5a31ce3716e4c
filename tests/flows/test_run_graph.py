"""The graph of a run's page shows rollout -> score in each step, and step -> train -> sync: with a real vLLM and trainer."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployed_run import Deployed, deploy
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from run_graph import Node, check_graph, read_graph

from rollmill.flows.post_train import post_train

pytestmark = pytest.mark.service

STEPS, GROUPS = 8, 6
"""Of the preset `small`."""


def wait_until(condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def read_flow_runs(folder: Path) -> list[str]:
    return list(json.loads((folder / "flow_runs.json").read_text())["flow_runs"])


def find_incomplete(nodes: list[Node], steps: set[int]) -> set[int]:
    """The steps that were not collected, trained and synced by task runs that are Completed, in a graph that is right."""
    check_graph(nodes)
    done = {node.label for node in nodes if node.state == "COMPLETED"}
    incomplete = set()
    for step in steps:
        rollouts = [label for label in done if label.startswith(f"step {step} / rollout ")]
        scores = [label for label in done if label.startswith(f"step {step} / score ")]
        ends = {f"step {step}", f"step {step} / train", f"version {step + 1} / sync"}
        if not (ends <= done and len(rollouts) == len(scores) == GROUPS):
            incomplete.add(step)
    return incomplete


def test_the_graph_is_right_of_a_killed_run_and_of_the_one_that_resumes_it(
    workplace: Any, prefect_api: str
) -> None:
    folder = workplace.folder / "runs" / "small"
    process = workplace.start("run", "small")
    wait_until(lambda: any(folder.glob("rollouts/step=000002/*.arrow")))
    (killed,) = read_flow_runs(folder)
    process.kill()
    process.communicate(timeout=120)
    finished = workplace.run("run", "small")
    assert finished.returncode == 0, finished.stdout

    before = read_graph(prefect_api, killed)
    counts = check_graph(before)
    assert counts["restore", "COMPLETED"] == 1
    assert counts["step", "COMPLETED"] >= 2
    assert {state for _, state in counts} <= {"COMPLETED", "CRASHED"}
    (ours,) = read_flow_runs(folder)
    after = read_graph(prefect_api, ours)
    synced = {node.label for node in before if node.state == "COMPLETED" and "/ sync" in node.label}
    assert find_incomplete(after, set(range(len(synced) + 1, STEPS))) == set()
    assert all(node.state == "COMPLETED" for node in after)


@pytest.mark.long
async def test_the_graph_is_right_after_a_kill_and_a_retry_in_one_flow_run(
    workplace: Any, prefect_api: str
) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        async with deploy(workplace, post_train) as run:
            with workplace.worker(run.pool):
                flow_run = await run.start()
                await run.when_steps(flow_run, 2)
                kill_flow(run)
                assert await run.when_over(flow_run) == StateType.CRASHED
                await run.when_reported(flow_run)
                await run.retried(flow_run)
                assert await run.when_over(flow_run) == StateType.COMPLETED, run.log()
    nodes = read_graph(prefect_api, flow_run)
    # What was stored before the kill is not made again, and a stored batch is trained on by the task run `restore`. The last
    # events of a killed process are lost, so that the step before may look unfinished too.
    incomplete = find_incomplete(nodes, set(range(STEPS)))
    assert max(incomplete, default=0) - min(incomplete, default=0) <= 1, incomplete
    counts = check_graph(nodes)
    assert counts["restore", "COMPLETED"] == 2
    assert {state for _, state in counts} <= {"COMPLETED", "CRASHED"}


def kill_flow(run: Deployed) -> None:
    """SIGKILL to the process in which the flow runs."""
    (pid,) = (
        pid
        for pid, line in run.of_run().items()
        if ("prefect.engine" in line or "rollmill.flows" in line) and "page_process" not in line
    )
    os.kill(pid, signal.SIGKILL)
