"""What an advantage is: a function of a group's rewards, and where it has one a second part over the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

OfGroup: TypeAlias = Callable[[np.ndarray], Any]
OfBatch: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]


@dataclass(frozen=True, slots=True)
class Advantage:
    """How advantages are taken.

    Attributes:
        of_group: called with [G] float64 rewards of a group's survivors, gives [G] numbers.
        of_batch: called with [B] float64 advantages by `of_group` of all trajectories that are trained on, and [B] int64
            sampled tokens of each, gives [B] numbers; None: there is no such part.
        needs_spread: True when a group whose rewards are all alike has nothing to train on, and is left out.
    """

    of_group: OfGroup
    of_batch: OfBatch | None = None
    needs_spread: bool = True
