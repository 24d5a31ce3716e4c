"""How much longer is a step for its reward? 0.89 s of computation a batch, concurrent with work that needs no processor.

The step's other work is a chain of waits on the event loop, as for HTTP answers of which each lets the next request go
out: whoever blocks the loop lengthens it. A batch of 32 groups of 8 is
scored meanwhile by a reward that computes for 0.89 s of CPU in all. `exposed` is the step's time less that of
the same step without reward. `at once`: all groups are there when the step begins, as where a batch is scored
after its rollouts; `as they come`: one after another until the other work ends, as in the flow, so that the last
group's reward can hide behind nothing.

- synchronous: the reward is called on the event loop;
- in a thread: `asyncio.to_thread`, one call for the batch;
- rollmill: `Scoring`, one call a trajectory, in `score.workers` processes.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

import numpy as np

from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest, Turn, rollout_rows
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.store.rows import Rows

GROUPS, GROUP_SIZE = 32, 8
REWARD_CPU_S = 0.89
N_WAITS, WAIT_S = 160, 0.01
OTHER_WORK_S = N_WAITS * WAIT_S
REPEATS = 7

Score = Callable[[Rows], Awaitable[object]]


def reward(candidate: Candidate) -> float:
    """Compute for this call's share of the batch's reward, holding the interpreter as any Python code does."""
    until = time.thread_time() + REWARD_CPU_S / (GROUPS * GROUP_SIZE)
    steps = 0
    while time.thread_time() < until:
        steps += sum(range(200)) > 0
    return float(steps > 0)


def group(number: int) -> Rows:
    ids = np.zeros(32, np.int32)
    trajectories = [
        Trajectory(
            work=TrajectoryRequest(f"r.{number}.{i}.0", number, i, 0, Example("0", {"answer": "2"}), 0, 1.0),
            status="complete",
            messages=(Message("user", "a question " * 20), Message("assistant", "an answer " * 60)),
            token_ids=ids,
            loss_mask=ids == 0,
            logprobs=np.zeros(32, np.float32),
            version_spans=((0, 0),),
            finish_reason="stop",
            turns=(Turn(0, 32, 1),),
            server="",
            started_at=datetime.now(UTC),
            duration_s=1.0,
            generate_s=1.0,
            environment_s=0.0,
            queue_s=0.0,
        )
        for i in range(GROUP_SIZE)
    ]
    return rollout_rows("r", 0, "benchmark", trajectories)


async def other_work() -> None:
    for _ in range(N_WAITS):
        await asyncio.sleep(WAIT_S)


async def step(groups: Sequence[Rows], score: Score | None, spread: bool) -> float:
    """Seconds of one step."""

    async def arrive(rows: Rows, number: int) -> None:
        await asyncio.sleep(OTHER_WORK_S * (number + 1) / GROUPS if spread else 0.0)
        if score is not None:
            await score(rows)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other_work())
        for number, rows in enumerate(groups):
            tasks.create_task(arrive(rows, number))
    return time.perf_counter() - started


def rewards(rows: Rows) -> list[float]:
    return [reward(Candidate(str(i), {}, (), True)) for i in range(rows.num_rows)]


async def synchronous(rows: Rows) -> None:
    rewards(rows)


async def in_a_thread(rows: Rows) -> None:
    await asyncio.to_thread(rewards, rows)


async def measure() -> dict[str, dict[str, float]]:
    """Exposed seconds by arrival and variant, the variants taking turns so that a busy minute hits all of them."""
    groups = [group(number) for number in range(GROUPS)]
    async with Scoring(ScoreConfig(scorer=f"{__spec__.name}:reward"), "r") as scoring:
        variants: dict[str, Score | None] = {
            "without": None,
            "synchronous": synchronous,
            "thread": in_a_thread,
            "rollmill": lambda rows: scoring.score(rows, step=0),
        }
        found: dict[str, dict[str, float]] = {}
        for arrival, spread in (("at_once", False), ("as_they_come", True)):
            seconds: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(REPEATS):
                for name, score in variants.items():
                    seconds[name].append(await step(groups, score, spread))
            base_s = statistics.median(seconds.pop("without"))
            found[arrival] = {name: statistics.median(each) - base_s for name, each in seconds.items()}
    return found


def main() -> None:
    found = asyncio.run(measure())
    print(f"{'exposed seconds':20}" + "".join(f"{arrival.replace('_', ' '):>16}" for arrival in found))
    for name in ("synchronous", "thread", "rollmill"):
        print(f"{name:20}" + "".join(f"{each[name]:16.3f}" for each in found.values()))
    figures = {
        "exposed_s": found["at_once"]["rollmill"],
        "exposed_as_they_come_s": found["as_they_come"]["rollmill"],
        "exposed_synchronous_s": found["at_once"]["synchronous"],
        "exposed_thread_s": found["at_once"]["thread"],
    }
    print(json.dumps({"benchmark": "exposed_reward", "reward_cpu_s": REWARD_CPU_S} | figures))


if __name__ == "__main__":
    main()
