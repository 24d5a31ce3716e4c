"""Which stored groups a step trains on again: a pure function of the groups there are, a seed and the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class StoredGroup:
    """A group of a run.

    Attributes:
        source: the run's location, from any working folder.
        step: the step under which it is stored.
        group: its number there.
    """

    source: str
    step: int
    group: int


def steps_of_a_pass(n_groups: int, groups_per_step: int) -> int:
    """Steps of one pass over the groups. Example: 10 groups, 4 a step: 2 steps, and two groups are left over."""
    return max(1, n_groups // groups_per_step)


def drawn(groups: Sequence[StoredGroup], *, seed: int, step: int, groups_per_step: int) -> list[StoredGroup]:
    """The groups of a step.

    Each pass takes them in an order of its own, without replacement; those left over at its end, fewer than a step
    has, are not drawn in that pass. With fewer groups than a step has, every step has all.

    Args:
        groups: all that can be drawn, in any order, none twice.
        seed: of the run.
        step: from 0.
        groups_per_step: at least 1.
    """
    in_order = sorted(groups)
    number, place = divmod(step, steps_of_a_pass(len(in_order), groups_per_step))
    order = np.random.default_rng([seed, number]).permutation(len(in_order))
    return [in_order[each] for each in order[place * groups_per_step : (place + 1) * groups_per_step]]
