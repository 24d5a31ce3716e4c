"""The scorers of an A/B comparison: those that keep state are refused, and what each is worth is estimated from stored rewards."""

import asyncio

import numpy as np
import polars as pl

from rollmill.flows.offline.ab_arms import AbComparison, Arm
from rollmill.flows.offline.retrain_sources import find_source_steps
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.score.order_trial import find_difference, select_compared, try_orders
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.score.step_estimate import GroupRewards, StepEstimate, estimate_step
from rollmill.tasks.score.stored_scores import SCORING_COLUMNS, groups_to_score, recompute_advantages
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read, scan
from rollmill.tasks.store.rows import Rows, rows_from_table
from rollmill.tasks.store.run.manifest import read_manifest

TRIED_STEPS, TRIED_GROUPS = 8, 8
"""A scorer is tried on the first groups of some steps, evenly spaced: at most so many of each."""


async def check_scorer_state(compared: AbComparison, key: str) -> None:
    """Refuse a scorer whose rewards depend on the order of the calls, or differ from its stored ones.

    A scorer that declares `keeps_state` is not tried.

    Raises:
        ConfigError: names the scorer and a trajectory with both rewards.
    """
    terms, config = compared.terms[key], compared.rescore_config(key)
    where = "in docs/how-to/scorers.md, under Scorers that keep state"
    if terms.keeps_state:
        remedy = f"it declares keeps_state = True, so that the arms would not be rewarded alike ({where})"
        raise ConfigError("--scorer", key, remedy)
    if terms.keeps_state is False:
        return
    folder = compared.folder
    chosen = await asyncio.to_thread(_choose_groups, folder)
    variables = read_manifest(folder).config.get("rollout", {}).get("env_variables", [])
    trial = await try_orders(config.score, [rows for _, rows in chosen], variables)
    if found := trial.find_difference():
        trajectory, one, other = found
        remedy = (
            f"it gave trajectory {short_id(trajectory)} the reward {one} in one order of the calls and {other} in another: it keeps "
            "state, or is random. Make its reward depend on the candidate alone; if it does not matter, declare "
            f"keeps_state = False ({where})"
        )
        raise ConfigError("--scorer", key, remedy)
    stored = await asyncio.to_thread(_read_scores, folder, key, {step for step, _ in chosen})
    if found := find_difference(stored, trial.forward):
        trajectory, one, other = found
        remedy = (
            f"trajectory {short_id(trajectory)} is stored with the reward {one}, and now gets {other}: the scorer was changed without "
            "a new version; raise its version"
        )
        raise ConfigError("--scorer", key, remedy)


def _choose_groups(folder: RunFolder) -> list[tuple[int, Rows]]:
    steps = list_steps(folder, "rollouts")
    places = np.unique(np.linspace(0, len(steps) - 1, TRIED_STEPS).round().astype(int))
    found = []
    for step in (steps[place] for place in places):
        rows = rows_from_table(read(folder, "rollouts", SCORING_COLUMNS, step=step))
        found += [
            (step, group) for group in groups_to_score(select_scorable(rows), (), whole=None)[:TRIED_GROUPS]
        ]
    return found


def _read_scores(folder: RunFolder, key: str, steps: set[int]) -> dict[str, dict[str, object]]:
    """Return the stored scores of some steps by trajectory id."""
    tables = [
        select_compared(rows_from_table(read(folder, "scores", scorer=key, step=step)))
        for step in sorted(steps)
    ]
    return {row["trajectory_id"]: row for rows in tables for row in rows.to_pylist()}


def estimate_arm(compared: AbComparison, arm: Arm) -> StepEstimate:
    """Estimate what a step of improvement by an arm's scores gains under each scorer, from the stored scores of the run."""
    rewards = _read_rewards(compared)
    # Turns and tokens are in the same trajectory, which has one weight.
    config = arm.config.score.model_copy(update={"credit": "trajectory"})
    missing = np.full(len(compared.terms), np.nan)
    groups = []
    for source, steps in find_source_steps(arm.config):
        for step, only in steps.items():
            for outcomes in recompute_advantages(source, step, arm.scores, config, only=only).values():
                for outcome in outcomes:
                    if not outcome.survivors:
                        continue
                    advantages = np.where(outcome.in_batch, outcome.advantages, 0.0).astype(np.float64)
                    of_group = [rewards.get(each.trajectory_id, missing) for each in outcome.survivors]
                    groups.append(GroupRewards(advantages, np.stack(of_group)))
    return estimate_step(groups)


def _read_rewards(compared: AbComparison) -> dict[str, np.ndarray]:
    """Return the [scorers] rewards of each trajectory of the run, NaN where a scorer gave none."""
    frames = [
        scan(compared.folder, "scores", ["trajectory_id", "reward"], scorer=key)
        .unique("trajectory_id", keep="last", maintain_order=True)
        .rename({"reward": f"r{at}"})
        for at, key in enumerate(compared.terms)
    ]
    joined = frames[0]
    for each in frames[1:]:
        joined = joined.join(each, on="trajectory_id", how="full", coalesce=True)
    rows = joined.collect()
    values = rows.select(pl.col("^r\\d+$").fill_null(float("nan"))).to_numpy()
    return dict(zip(rows["trajectory_id"].to_list(), values, strict=True))
