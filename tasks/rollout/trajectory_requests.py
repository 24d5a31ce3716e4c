"""Plan the trajectories of a group: problem and seeds as functions of the run's seed, chunks, and the group's deadline."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Environment
from rollmill.tasks.rollout.environment_calls import fetch_problem
from rollmill.tasks.rollout.episode import Deadline
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.store.run.step_plan import Attempt

Item = TypeVar("Item")


# A step may have groups of two epochs, of each of several environments.
@lru_cache(maxsize=8)
def _epoch_order(seed: int, epoch: int, n_examples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 0x0DE5]).permutation(n_examples)


def example_index(seed: int, number: int, n_examples: int) -> int:
    """Return the index of an environment's problem with this number: each occurs once an epoch, in an order reshuffled each epoch.

    Refills that no step needed count: their problems are skipped in that epoch.
    """
    epoch, place = divmod(number, n_examples)
    return int(_epoch_order(seed, epoch, n_examples)[place])


def sampling_seed(seed: int, group: int, sample: int) -> int:
    """Compute the sampling seed of one trajectory from the run's seed, group and sample: 0 <= result < 2**63."""
    state = np.random.SeedSequence([seed, group, sample]).generate_state(2, np.uint32)
    return int(state[0]) << 31 | int(state[1]) >> 1


def check_prompts(
    environment: Environment, rollout: RolloutConfig, n_held_out: int, n_groups: int | None = None
) -> None:
    """Refuse an environment with too few problems for a step with all refills, or for the evaluation.

    `n_groups` is the largest number of groups that it has of a step; None: all.

    Raises:
        ConfigError: names the setting and the number of problems.
    """
    train, held_out = environment.size("train"), environment.size("held_out")
    n_groups = rollout.groups_per_step if n_groups is None else n_groups
    if n_groups > train:
        share = "" if n_groups == rollout.groups_per_step else f", and its share of a step is {n_groups}"
        remedy = (
            f"environment {environment.name} has {train} training problems{share}; ask for at most that many"
        )
        raise ConfigError("rollout.groups_per_step", rollout.groups_per_step, remedy)
    if n_groups + rollout.max_refill_groups > train:
        remedy = (
            f"environment {environment.name} has {train} training problems, of which rollout.groups_per_step takes "
            f"{n_groups} a step; ask for at most {train - n_groups} refills"
        )
        raise ConfigError("rollout.max_refill_groups", rollout.max_refill_groups, remedy)
    if n_held_out > held_out:
        remedy = f"environment {environment.name} has {held_out} held-out problems; ask for at most that many"
        raise ConfigError("evaluate.n_prompts", n_held_out, remedy)


async def plan_group_requests(
    environment: Environment,
    *,
    run: str,
    seed: int,
    group: int,
    attempts: Sequence[Attempt],
    temperature: float,
    timeout_s: float,
    index: int | None = None,
) -> list[TrajectoryRequest]:
    """Create the sampling requests for a group's trajectories; they depend on the arguments only.

    `index` is that of the group's problem among the environment's training problems; None: it follows from the group's number.
    If the environment does not give the problem within `timeout_s` seconds, the requests have `missing` set.

    Example: run "ab", group 7 and the first attempts of samples 0 and 3 give the trajectory ids "ab.7.0.0" and
    "ab.7.3.0".
    """
    index = example_index(seed, group, environment.size("train")) if index is None else index
    example, missing = await fetch_problem(environment, "train", index, timeout_s)
    return [
        TrajectoryRequest(
            trajectory_id=f"{run}.{group}.{each.sample}.{each.attempt}",
            group=group,
            sample=each.sample,
            attempt=each.attempt,
            example=example,
            seed=sampling_seed(seed, group, each.sample),
            temperature=temperature,
            missing=missing,
        )
        for each in attempts
    ]


def split_chunks(work: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a sequence into chunks of at most `size` items; 0: one chunk. Example: 5 items by 2 give 2, 2 and 1."""
    step = size or max(1, len(work))
    return [work[first : first + step] for first in range(0, len(work), step)]


# Longest time of a group, as a multiple of rollout.trajectory_timeout_s: its last trajectory may get a slot when the first one ends.
GROUP_TIMEOUT_RATIO = 2.0


def group_deadline(timeout_s: float) -> Deadline:
    """Return the deadline of a group whose trajectories are requested now."""
    return Deadline(asyncio.get_running_loop().time() + timeout_s, f"the group's limit of {timeout_s:g} s")
