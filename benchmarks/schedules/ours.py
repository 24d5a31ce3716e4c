"""Rollmill on the same work: one step through its own fan-out, as a flow run with a task run for each part."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.utilities.annotations import quote

from benchmarks.schedules.latencies import GROUP_SIZE, N_GROUPS, ROLLOUT_SLOTS, SCORING_SLOTS, draw
from benchmarks.schedules.sleeping import STOPWATCH, SleepingSampler, score_group, score_trajectory
from benchmarks.schedules.stopwatch import Stopwatch
from benchmarks.schedules.timeline import Timeline
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.live_run import Run, open_run
from rollmill.flows.step.step_collection import collect_step
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from tests.stubs.toy_settings import validate_toy

Mode = Literal["trajectory", "group"]

TIMEOUT_S = 3600.0
SCORERS = {"trajectory": score_trajectory, "group": score_group}
TRAJECTORIES_PER_TASK = {"trajectory": 1, "group": 0}


@flow(flow_run_name="seed {seed} by {mode}", persist_result=False)
async def overlap(folder: Path, mode: Mode, seed: int, median_s: float) -> Timeline:
    """Collect one step of the drawn work.

    Returns:
        What happened when; the end is when the last group is judged and all of it stored.
    """
    model = save_character_tokenizer(folder / "model")
    async with open_run(f"{mode}-{seed}", settings(folder, mode), model) as run:
        timeline = await _timed(run, seed, median_s)
        await run.recording.wait_until_recorded()
    return timeline


async def _timed(run: Run, seed: int, median_s: float) -> Timeline:
    latencies, stopwatch = draw(seed, median_s), Stopwatch()
    STOPWATCH.set(stopwatch)
    (environment,) = run.environments
    sampler = SleepingSampler(latencies, environment.player.tokenizer, stopwatch)
    slow = replace(environment, player=replace(environment.player, sampler=sampler))
    planted = replace(run, environments=(slow,))
    run.recording.count_start()
    collected = await collect_step(quote(planted), 0, wait_for=())
    makespan_s = stopwatch.elapsed_s()
    scored = sum(len(outcome.survivors) for outcome in collected.outcomes)
    if scored != N_GROUPS * GROUP_SIZE:
        raise RuntimeError(f"{scored} trajectories of {N_GROUPS * GROUP_SIZE} were scored")
    return Timeline(makespan_s, stopwatch.rollouts, stopwatch.scores)


def settings(folder: Path, mode: Mode) -> RunConfig:
    """A run with as many slots as everyone has."""
    scorer = SCORERS[mode]
    return validate_toy(
        {
            "model": str(folder / "model"),
            "rollout": {
                "groups_per_step": N_GROUPS,
                "group_size": GROUP_SIZE,
                "max_in_flight": ROLLOUT_SLOTS,
                "trajectories_per_task": TRAJECTORIES_PER_TASK[mode],
                "trajectory_timeout_s": TIMEOUT_S,
            },
            "score": {
                "scorer": f"{scorer.__module__}:{scorer.__name__}",
                "max_in_flight": SCORING_SLOTS,
                "timeout_s": TIMEOUT_S,
            },
            "store": {"root": str(folder / "runs")},
        }
    )
