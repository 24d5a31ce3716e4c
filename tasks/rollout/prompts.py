"""Which problem a group gets, and which seed a trajectory: pure functions of the run's seed."""

from functools import lru_cache

import numpy as np

from tasks.errors import ConfigError
from tasks.rollout.config import RolloutConfig
from tasks.rollout.environment import Environment


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n_examples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 0x0DE5]).permutation(n_examples)


def example_index(seed: int, group: int, n_examples: int) -> int:
    """Number of the problem for a group: each problem once an epoch, in an order shuffled anew each epoch.

    The problems of refills that no step asked for are passed over in their epoch.
    """
    epoch, place = divmod(group, n_examples)
    return int(_order(seed, epoch, n_examples)[place])


def sampling_seed(seed: int, group: int, sample: int) -> int:
    """Seed of the sampler for one trajectory, 0 <= seed < 2**63."""
    state = np.random.SeedSequence([seed, group, sample]).generate_state(2, np.uint32)
    return int(state[0]) << 31 | int(state[1]) >> 1


def check_prompts(environment: Environment, rollout: RolloutConfig, n_held_out: int) -> None:
    """Refuse an environment that has too few problems for a step, with all refills, or for the evaluation.

    Raises:
        ConfigError: naming the setting and what the environment has.
    """
    train, held_out = environment.size("train"), environment.size("held_out")
    if rollout.groups_per_step > train:
        remedy = f"environment {environment.name} has {train} training problems; ask for at most that many"
        raise ConfigError("rollout.groups_per_step", rollout.groups_per_step, remedy)
    if rollout.groups_per_step + rollout.max_refill_groups > train:
        remedy = (
            f"environment {environment.name} has {train} training problems, of which rollout.groups_per_step takes "
            f"{rollout.groups_per_step} a step; ask for at most {train - rollout.groups_per_step} refills"
        )
        raise ConfigError("rollout.max_refill_groups", rollout.max_refill_groups, remedy)
    if n_held_out > held_out:
        remedy = f"environment {environment.name} has {held_out} held-out problems; ask for at most that many"
        raise ConfigError("evaluate.n_prompts", n_held_out, remedy)
