"""Which stored groups a step of `retrain` trains on: a pure function of the groups, a seed and the step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class StoredGroup:
    """Where a group is stored: absolute location of its run, step, and number of the group."""

    source: str
    step: int
    group: int


def steps_per_pass(n_groups: int, groups_per_step: int) -> int:
    """Return the number of steps, at least 1, in one pass over the groups.

    Example: 10 groups, 4 per step: 2 steps; two groups are left over.
    """
    return max(1, n_groups // groups_per_step)


def draw_groups(
    groups: Sequence[StoredGroup], *, seed: int, step: int, groups_per_step: int
) -> list[StoredGroup]:
    """Draw the groups that a step trains on; the same arguments always give the same groups.

    Each pass draws the groups in a new random order, without replacement. Groups left over at the end of a pass, fewer than a step
    needs, are not drawn in that pass. If there are fewer groups than a step needs, every step gets all of them. `groups` may be in
    any order, without duplicates; `seed` is that of the run.
    """
    # Sorted, and seeded by run and pass: a resumed run draws the same groups without drawing those of earlier steps.
    in_order = sorted(groups)
    number, place = divmod(step, steps_per_pass(len(in_order), groups_per_step))
    order = np.random.default_rng([seed, number]).permutation(len(in_order))
    return [in_order[each] for each in order[place * groups_per_step : (place + 1) * groups_per_step]]
