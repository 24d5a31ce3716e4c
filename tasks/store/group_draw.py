"""Which stored groups a step of `retrain` trains on: a pure function of the groups, a seed and the step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class StoredGroup:
    """Where a group is stored, and how a step draws it.

    Attributes:
        source: absolute location of its run.
        step: of that run.
        group: its number.
        place: in the order in which groups are drawn.
        weight: to which the probability that a step draws it is proportional.
    """

    source: str
    step: int
    group: int
    place: int = field(default=0, compare=False)
    weight: float = field(default=1.0, compare=False)


def steps_per_pass(n_groups: int, groups_per_step: int) -> int:
    """Return the number of steps, at least 1, in one pass over the groups.

    Example: 10 groups, 4 per step: 2 steps; two groups are left over.
    """
    return max(1, n_groups // groups_per_step)


Order = Literal["random", "place", "weight"]
"""In which order groups are drawn: of each pass a random one, by place, or at random by weight."""


def draw_groups(
    groups: Sequence[StoredGroup], *, seed: int, step: int, groups_per_step: int, order: Order = "random"
) -> list[StoredGroup]:
    """Draw the groups that a step trains on; the same arguments always give the same groups.

    Each pass draws the groups once, in a new random order or by place. Groups left over at the end of a pass, fewer than a step
    needs, are not drawn in that pass. By weight there are no passes: each step draws from all groups, without replacement, one after
    the other in proportion to the weights of those that remain. If there are fewer groups than a step needs, every step gets all of
    them. `groups` may be in any order, without duplicates, with weights above 0; `seed` is that of the run.
    """
    # Sorted, and seeded by run and pass: a resumed run draws the same groups without drawing those of earlier steps.
    in_order = sorted(groups)
    number, place = divmod(step, steps_per_pass(len(in_order), groups_per_step))
    if order == "weight":
        weights = np.array([each.weight for each in in_order])
        n = min(groups_per_step, len(in_order))
        drawn = np.random.default_rng([seed, step]).choice(
            len(in_order), n, replace=False, p=weights / weights.sum()
        )
        return [in_order[each] for each in drawn]
    if order == "place":
        in_order.sort(key=lambda each: each.place)
        shuffled = np.arange(len(in_order))
    else:
        shuffled = np.random.default_rng([seed, number]).permutation(len(in_order))
    return [in_order[each] for each in shuffled[place * groups_per_step : (place + 1) * groups_per_step]]
