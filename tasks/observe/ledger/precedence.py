"""What came after what in the lanes of a step's groups, or of an evaluation: their work as a schedule."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tasks.observe.ledger.lanes import Kin, kin_of
from tasks.observe.ledger.schedule import Schedule, Work
from tasks.observe.ledger.timeline import FLOW, is_wait

SLOT, PLACES = "slot", ("slot", "workers", "calls")
"""Causes of waits for a place; a slot is kept while a trajectory is played, the others while a scorer is at work."""
SCORING, SCORER = "scoring", ("scoring", "waiting_for_scorer")
TOLERANCE_US = 1000
"""Up to which a piece follows another without a pause."""


class Stretch(NamedTuple):
    """A piece of a lane: work, or a wait; microseconds."""

    lane: str
    name: str
    cause: str
    start: int
    end: int


def schedule_of(stretches: Iterable[Stretch]) -> Schedule:
    """The schedule of what the lanes of one step's groups, or of one evaluation, did; in the order of their starts."""
    builder = _Builder(list(stretches))
    return Schedule(builder.works(), builder.places())


@dataclass(slots=True)
class _Lane:
    """What is known of a lane so far.

    Attributes:
        kin: its family.
        works: of it, by the index in the schedule.
        ends: when each of these ended.
        wait: since when it waits, and for which place; None while it does not.
        is_played: True for a trajectory from where it waits for a scorer.
    """

    kin: Kin
    works: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wait: tuple[int, str] | None = None
    is_played: bool = False

    def last(self, until: int) -> tuple[int, int] | None:
        """When its last work by a moment ended, and its index in the schedule."""
        at = bisect_right(self.ends, until + TOLERANCE_US)
        return (self.ends[at - 1], self.works[at - 1]) if at else None


@dataclass(slots=True)
class _Family:
    """A group and its trajectories, or an evaluation and its.

    Attributes:
        lanes: of all of them.
        own: of the group itself, or of the evaluation, by "", and of each trajectory, by its name.
        scored: when trajectories began to be scored, or to wait for that, in order.
        wait: from when to when the group waited for the first slot; None when it did not.
        opened_by: names of what was done between that and the first trajectory, to begin it.
    """

    lanes: list[_Lane] = field(default_factory=list)
    own: dict[str, list[_Lane]] = field(default_factory=lambda: defaultdict(list))
    scored: list[int] = field(default_factory=list)
    wait: tuple[int, int] | None = None
    opened_by: list[str] | None = None


class _Builder:
    """Finds what came after what, in stretches that are in the order of their starts."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._began = min((each.start for each in stretches), default=0)
        self._families: dict[str, _Family] = defaultdict(_Family)
        self._lanes: dict[str, _Lane] = {}
        self._of_groups: list[tuple[int, int]] = []
        for each in stretches:
            lane = self._lanes.get(each.lane) or self._opened(each.lane)
            if lane.kin.is_part and each.name in SCORER:
                self._families[lane.kin.family].scored.append(each.start)
        waits = Counter(each.cause for each in stretches if _is_for_place(each))
        self._is_short_of_slots = waits.pop(SLOT, 0) > 0
        self._scorers = next((cause for cause, _ in waits.most_common()), "")
        self._works: list[Work] = []
        self._times: list[tuple[int, int]] = []
        self._plays: dict[str, tuple[int, int]] = {}
        for each in stretches:
            lane = self._lanes[each.lane]
            if _is_for_place(each):
                self._wait(each, lane)
            elif lane.kin.is_part:
                self._add_part(each, lane)
            else:
                self._add_whole(each, lane)

    def works(self) -> list[Work]:
        """All work, with the slots that trajectories keep."""
        works = list(self._works)
        for first, last in self._plays.values() if self._is_short_of_slots else ():
            works[first] = works[first]._replace(takes=SLOT)
            works[last] = works[last]._replace(gives=SLOT)
        return works

    def places(self) -> dict[str, int]:
        """As many of each as were in use at once."""
        used = defaultdict(list)
        for work, times in zip(self._works, self._times, strict=True):
            if work.takes:
                used[work.takes].append(times)
        if self._is_short_of_slots:
            plays = self._plays.values()
            used[SLOT] = [(self._times[first][0], self._times[last][1]) for first, last in plays]
        return {place: _most_at_once(times) for place, times in used.items()}

    def _opened(self, name: str) -> _Lane:
        lane = self._lanes[name] = _Lane(kin_of(FLOW, name))
        family = self._families[lane.kin.family]
        family.lanes.append(lane)
        family.own[_sample_of(name) if lane.kin.is_part else ""].append(lane)
        return lane

    def _wait(self, each: Stretch, lane: _Lane) -> None:
        if each.cause == SLOT and not lane.kin.is_part:
            family = self._families[lane.kin.family]
            family.wait, family.opened_by = (each.start, each.end), []
            return
        lane.wait = lane.wait or (each.start, each.cause)
        lane.is_played |= each.cause != SLOT

    def _add_part(self, each: Stretch, lane: _Lane) -> None:
        """A piece of a trajectory. What its group did from its first slot until it began is in the slot's time."""
        family = self._families[lane.kin.family]
        lane.is_played |= each.name == SCORING
        ready = lane.wait[0] if lane.wait else each.start
        if not lane.works and family.wait and family.wait[1] <= ready:
            opening, family.opened_by = family.opened_by, None
            began, granted = family.wait
            if lane.wait is None:
                name = opening[0] if opening else ""
                self._append(each._replace(name=name, start=granted, end=each.start), lane, began)
            else:
                ready = began
        self._append(each, lane, ready)
        lane.wait = None

    def _add_whole(self, each: Stretch, lane: _Lane) -> None:
        """A piece of a group itself; not what opens it, and not what is around its trajectories' scores."""
        family = self._families[lane.kin.family]
        if family.opened_by is not None and lane.kin.family:
            family.opened_by.append(each.name)
            return
        at = bisect_left(family.scored, each.start)
        is_around = at < len(family.scored) and family.scored[at] <= each.end
        if each.name == SCORING and is_around and lane.wait is None:
            return
        self._append(each, lane, lane.wait[0] if lane.wait else each.start)
        lane.wait = None
        insort(self._of_groups, (each.end, len(self._works) - 1))

    def _append(self, each: Stretch, lane: _Lane, ready: int) -> None:
        place = ""
        if each.name == SCORING:
            place = lane.wait[1] if lane.wait else self._scorers if lane.kin.is_part else ""
        after, lag_us = self._came_after(each, lane, ready)
        at = len(self._works)
        self._works.append(Work(each.name, each.end - each.start, after, lag_us, place, place))
        self._times.append((each.start, each.end))
        lane.works.append(at)
        lane.ends.append(each.end)
        if lane.kin.is_part and not lane.is_played:
            self._plays[each.lane] = self._plays.get(each.lane, (at, at))[0], at

    def _came_after(self, each: Stretch, lane: _Lane, ready: int) -> tuple[tuple[int, ...], int]:
        """What a piece came after, and how long after: of its lane, or of others where it came after a pause."""
        is_join = (each.name == SCORING or not lane.kin.is_part) and not each.lane.startswith("v")
        own = lane.last(ready) if lane.works else None
        if own and (not is_join or ready - own[0] <= TOLERANCE_US):
            return (own[1],), max(0, ready - own[0])
        family = self._families[lane.kin.family]
        # what begins a trajectory came after what its group, or an earlier attempt of it, did
        relatives = family.lanes if is_join else [*family.own[""], *family.own[_sample_of(each.lane)]]
        before = [found for other in relatives if (found := other.last(ready))]
        if not before:  # groups begin one after another
            at = bisect_right(self._of_groups, (ready + TOLERANCE_US, len(self._works)))
            before = self._of_groups[at - 1 : at]
        if not before:
            return (), ready - self._began
        ends, works = zip(*before, strict=True)
        return works, max(0, ready - max(ends))


def _sample_of(name: str) -> str:
    """The trajectory that a lane is of, whichever attempt or scorer. Example: of 7.3.1 and 7.3/exact it is 7.3."""
    return ".".join(name.partition("/")[0].split(".")[:2])


def _is_for_place(each: Stretch) -> bool:
    return is_wait(each.name) and each.cause in PLACES


def _most_at_once(times: Iterable[tuple[int, int]]) -> int:
    """How many of these intervals lie over one instant, at most."""
    edges = sorted(edge for start, end in times if end > start for edge in ((start, 1), (end, -1)))
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return max(1, most)
