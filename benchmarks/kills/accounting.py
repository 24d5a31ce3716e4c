"""What kills cost, from the moments of kills and of ended steps; pure functions of numbers."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from benchmarks.kills.managed_run import Moment

STEPS_AFTER = 2
"""Ended steps after a kill within which its cost has shown."""


class Kill(NamedTuple):
    """One kill: which role, and when (`time.monotonic`)."""

    role: str
    at_s: float


class StepSeconds:
    """Seconds of an undisturbed step by its number modulo a period, since every tenth evaluates and writes a checkpoint.

    Example: steps that end at 0, 1, 2, 5, 6, 7, 10 s with period 3 last 1, 1 and 3 s.
    """

    def __init__(self, steps: Sequence[Moment], period: int) -> None:
        seconds = defaultdict[int, list[float]](list)
        for before, after in pairwise(steps):
            seconds[after.step % period].append(after.at_s - before.at_s)
        self._mean = {phase: fmean(each) for phase, each in seconds.items()}
        self._period = period

    def times(self, ratio: float) -> "StepSeconds":
        """Return the same steps, each `ratio` times as long."""
        scaled = copy.copy(self)
        scaled._mean = {phase: ratio * each for phase, each in self._mean.items()}
        return scaled

    def total(self, first: int, last: int) -> float:
        """Return the seconds of the steps `first` to `last`, both included."""
        return sum(self._mean[step % self._period] for step in range(first, last + 1))

    @property
    def mean(self) -> float:
        """Seconds of a step in the mean."""
        return self.total(0, self._period - 1) / self._period


def effective_share(steps: Sequence[Moment], useful: StepSeconds) -> float:
    """Return useful seconds over all seconds, from the end of the first step to the end of the last one."""
    first, last = steps[0], steps[-1]
    return useful.total(first.step + 1, last.step) / (last.at_s - first.at_s)


def calm_ratio(steps: Sequence[Moment], kills: Sequence[Kill], useful: StepSeconds) -> float:
    """Return the seconds of a killed run's steps that no kill touched, over those of the same steps undisturbed; 1.0 without any.

    No kill was in them or in the STEPS_AFTER before. It is above 1 if others used the machine more than before.
    """
    own_s = undisturbed_s = 0.0
    for at in range(STEPS_AFTER + 1, len(steps)):
        begin, before, end = steps[at - 1 - STEPS_AFTER], steps[at - 1], steps[at]
        if not any(begin.at_s <= kill.at_s <= end.at_s for kill in kills):
            own_s += end.at_s - before.at_s
            undisturbed_s += useful.total(before.step + 1, end.step)
    return own_s / undisturbed_s if undisturbed_s else 1.0


def kill_costs(steps: Sequence[Moment], kills: Sequence[Kill], useful: StepSeconds) -> list[float | None]:
    """Return the seconds that each kill cost; None for one that another kill, or the run's end, followed too soon.

    It is the time from the last step's end before the kill to the end of the second step after it, less the
    undisturbed seconds of the steps in between.
    """
    costs: list[float | None] = []
    for kill, following in zip(kills, [*kills[1:], None], strict=True):
        before = [each for each in steps if each.at_s <= kill.at_s]
        after = [each for each in steps if each.at_s > kill.at_s][:STEPS_AFTER]
        is_shown = before and len(after) == STEPS_AFTER
        if not is_shown or (following and following.at_s < after[-1].at_s):
            costs.append(None)
            continue
        seconds = after[-1].at_s - before[-1].at_s
        costs.append(seconds - useful.total(before[-1].step + 1, after[-1].step))
    return costs


def mean_by_role(kills: Sequence[Kill], costs: Sequence[float | None]) -> dict[str, float]:
    """Return the mean cost of each role that has one."""
    found = defaultdict[str, list[float]](list)
    for kill, cost in zip(kills, costs, strict=True):
        if cost is not None:
            found[kill.role].append(cost)
    return {role: fmean(each) for role, each in found.items()}


def modelled_share(mean_cost_s: float, interval_s: float) -> float:
    """Return the share with one kill of a mean cost in each interval of wall seconds. Example: 18 s, 180 s: 0.9."""
    return 1.0 - mean_cost_s / interval_s


def peer_costs(
    steps: Sequence[Moment],
    kills: Sequence[Kill],
    useful: StepSeconds,
    *,
    checkpoint_every: int,
    restart_s: float,
    others: Mapping[str, float],
) -> list[float]:
    """Return what the same kills cost a system that restarts from its last checkpoint; computed, not run.

    A kill of the flow, a trainer rank or a server ends the whole job: it costs the restart, the steps since the last
    checkpoint, and the open step. For the other roles `others` has the seconds, 0 where it has none.
    """
    costs = []
    for kill in kills:
        if kill.role not in ("flow", "trainer rank", "server"):
            costs.append(others.get(kill.role, 0.0))
            continue
        last = max((each for each in steps if each.at_s <= kill.at_s), key=lambda each: each.at_s)
        # Checkpoints follow steps 9, 19, ... if one is made every ten.
        first_lost = (last.step + 1) // checkpoint_every * checkpoint_every
        open_s = min(kill.at_s - last.at_s, useful.total(last.step + 1, last.step + 1))
        costs.append(restart_s + useful.total(first_lost, last.step) + open_s)
    return costs
