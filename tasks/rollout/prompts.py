"""Which problem a group gets, and which seed a trajectory: pure functions of the run's seed."""

from functools import lru_cache

import numpy as np

from tasks.errors import ConfigError
from tasks.rollout.environment import Environment


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n_examples: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 0x0DE5]).permutation(n_examples)


def example_index(seed: int, group: int, n_examples: int) -> int:
    """Number of the problem for a group: each problem once an epoch, in an order shuffled anew each epoch."""
    epoch, place = divmod(group, n_examples)
    return int(_order(seed, epoch, n_examples)[place])


def sampling_seed(seed: int, group: int, sample: int) -> int:
    """Seed of the sampler for one trajectory, 0 <= seed < 2**63."""
    state = np.random.SeedSequence([seed, group, sample]).generate_state(2, np.uint32)
    return int(state[0]) << 31 | int(state[1]) >> 1


def check_prompts(environment: Environment, groups_per_step: int, n_held_out: int) -> None:
    """Refuse an environment that has too few problems for a step or for the evaluation.

    Raises:
        ConfigError: naming the setting and what the environment has.
    """
    train, held_out = environment.size("train"), environment.size("held_out")
    if groups_per_step > train:
        remedy = f"environment {environment.name} has {train} training problems; ask for at most that many"
        raise ConfigError("rollout.groups_per_step", groups_per_step, remedy)
    if n_held_out > held_out:
        remedy = f"environment {environment.name} has {held_out} held-out problems; ask for at most that many"
        raise ConfigError("evaluate.n_prompts", n_held_out, remedy)
