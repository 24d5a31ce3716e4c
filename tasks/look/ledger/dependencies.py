"""Reconstruct the schedule of a step's rollouts from spans, to simulate it under other conditions."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from rollmill.tasks.look.ledger.span_timeline import FLOW, LaneFamily, family_from_lane, is_wait

_ENDS, _IS_READY = 0, 1


class Job(NamedTuple):
    """One item of work in a schedule that can be simulated.

    Attributes:
        name: name of its span.
        us: duration in microseconds.
        after: indices of the jobs it depends on.
        lag_us: microseconds between the end of the last of these (or the beginning) and its start.
        takes: resource it has to wait for; empty: none.
        gives: resource it releases at its end; empty: none.
    """

    name: str
    us: int
    after: tuple[int, ...]
    lag_us: int
    takes: str = ""
    gives: str = ""


class Schedule:
    """The work of a step's rollouts or of an evaluation, to be simulated; `places` is the capacity of each limited resource."""

    def __init__(self, works: list[Job], places: Mapping[str, int]) -> None:
        self._works, self._places = works, places
        self._behind: list[list[int]] = [[] for _ in works]
        for at, work in enumerate(works):
            for before in work.after:
                self._behind[before].append(at)

    @property
    def places(self) -> Set[str]:
        """Names of the resources whose capacity is limited, such as `slot`."""
        return self._places.keys()

    def less_us(self, shares: Mapping[str, float]) -> float:
        """Return the most microseconds by which the schedule can get shorter with `shares` as factors on the duration of jobs, by name."""
        return sum(work.us * (1.0 - shares[work.name]) for work in self._works if work.name in shares)

    def length_us(self, shares: Mapping[str, float], unlimited: Collection[str] = ()) -> int:
        """Simulate the schedule, and return its length in microseconds.

        `shares` are factors on the duration of jobs, by name (1 for all others); `unlimited` are resources without a capacity limit.
        """
        free = {place: n for place, n in self._places.items() if place not in unlimited}
        queues: dict[str, list[tuple[int, int]]] = {place: [] for place in free}
        left = [len(work.after) for work in self._works]
        turns = [(work.lag_us, _IS_READY, at) for at, work in enumerate(self._works) if not work.after]
        heapq.heapify(turns)
        now = 0

        def begin(at: int) -> None:
            work = self._works[at]
            heapq.heappush(turns, (now + round(work.us * shares.get(work.name, 1.0)), _ENDS, at))

        # Of events at one time the ends come first, so that what they release is free for those that are ready.
        while turns:
            now, what, at = heapq.heappop(turns)
            work = self._works[at]
            if what == _IS_READY:
                if work.takes not in free:
                    begin(at)
                elif free[work.takes]:
                    free[work.takes] -= 1
                    begin(at)
                else:
                    heapq.heappush(queues[work.takes], (now, at))
                continue
            # The one that has waited longest gets the resource, as in the run.
            if queues.get(work.gives):
                begin(heapq.heappop(queues[work.gives])[1])
            elif work.gives in free:
                free[work.gives] += 1
            for behind in self._behind[at]:
                left[behind] -= 1
                if not left[behind]:
                    heapq.heappush(turns, (now + self._works[behind].lag_us, _IS_READY, behind))
        return now


SLOT, PLACES = "slot", ("slot", "workers", "calls")
"""Resources that waits are for: a trajectory holds its slot while it is sampled, a scorer the others while it works."""
SCORING, SCORER = "scoring", ("scoring", "waiting_for_scorer")
TOLERANCE_US = 1000
"""Largest gap in microseconds that does not count as a pause."""


class Stretch(NamedTuple):
    """An interval of work or waiting in a lane, with start and end in microseconds."""

    lane: str
    name: str
    cause: str
    start: int
    end: int


def build_schedule(stretches: Iterable[Stretch]) -> Schedule:
    """Build the schedule of one step's rollouts, or of one evaluation, from recorded intervals ordered by start."""
    builder = _Builder(list(stretches))
    return Schedule(builder.works(), builder.places())


@dataclass(slots=True)
class _Lane:
    """State of one lane of the flow while the schedule is built.

    Attributes:
        kin: its family.
        works: indices of its jobs.
        ends: end of each of these jobs.
        wait: start and resource of its current wait; None if it does not wait.
        is_played: True for a trajectory that waits for a scorer or is past that.
    """

    kin: LaneFamily
    works: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    wait: tuple[int, str] | None = None
    is_played: bool = False

    def last(self, until: int) -> tuple[int, int] | None:
        """Return the end and the index of the lane's last job that ended by `until`; None if there is none."""
        at = bisect_right(self.ends, until + TOLERANCE_US)
        return (self.ends[at - 1], self.works[at - 1]) if at else None


@dataclass(slots=True)
class _Family:
    """The lanes of a group and its trajectories, or of an evaluation and its trajectories.

    Attributes:
        lanes: all lanes.
        own: lane of the group by "", and of each trajectory by its name.
        scored: times at which trajectories began to be scored or to wait for it, in order.
        wait: start and end of the group's wait for its first slot; None without one.
        opened_by: names of the work between that wait and the first trajectory.
    """

    lanes: list[_Lane] = field(default_factory=list)
    own: dict[str, list[_Lane]] = field(default_factory=lambda: defaultdict(list))
    scored: list[int] = field(default_factory=list)
    wait: tuple[int, int] | None = None
    opened_by: list[str] | None = None


class _Builder:
    """Finds which recorded intervals, ordered by start, depended on which others, and what resources they held."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._began = min((each.start for each in stretches), default=0)
        self._families: dict[str, _Family] = defaultdict(_Family)
        self._lanes: dict[str, _Lane] = {}
        self._of_groups: list[tuple[int, int]] = []
        for each in stretches:
            lane = self._lanes.get(each.lane) or self._open_lane(each.lane)
            if lane.kin.is_part and each.name in SCORER:
                self._families[lane.kin.family].scored.append(each.start)
        waits = Counter(each.cause for each in stretches if _is_wait_for_slot(each))
        self._is_short_of_slots = waits.pop(SLOT, 0) > 0
        self._scorers = next((cause for cause, _ in waits.most_common()), "")
        self._works: list[Job] = []
        self._times: list[tuple[int, int]] = []
        self._plays: dict[str, tuple[int, int]] = {}
        for each in stretches:
            lane = self._lanes[each.lane]
            if _is_wait_for_slot(each):
                self._wait(each, lane)
            elif lane.kin.is_part:
                self._add_part(each, lane)
            else:
                self._add_whole(each, lane)

    def works(self) -> list[Job]:
        """Return all jobs; those that begin and end a trajectory take and release its slot, if slots were scarce."""
        works = list(self._works)
        # A run whose trajectories never waited for a slot has more of them than it can use.
        for first, last in self._plays.values() if self._is_short_of_slots else ():
            works[first] = works[first]._replace(takes=SLOT)
            works[last] = works[last]._replace(gives=SLOT)
        return works

    def places(self) -> dict[str, int]:
        """Return the largest number of each resource that was in use at once, by name."""
        used = defaultdict(list)
        for work, times in zip(self._works, self._times, strict=True):
            if work.takes:
                used[work.takes].append(times)
        if self._is_short_of_slots:
            plays = self._plays.values()
            used[SLOT] = [(self._times[first][0], self._times[last][1]) for first, last in plays]
        return {place: _max_concurrent(times) for place, times in used.items()}

    def _open_lane(self, name: str) -> _Lane:
        lane = self._lanes[name] = _Lane(family_from_lane(FLOW, name))
        family = self._families[lane.kin.family]
        family.lanes.append(lane)
        family.own[_sample_from_lane(name) if lane.kin.is_part else ""].append(lane)
        return lane

    def _wait(self, each: Stretch, lane: _Lane) -> None:
        if each.cause == SLOT and not lane.kin.is_part:
            family = self._families[lane.kin.family]
            family.wait, family.opened_by = (each.start, each.end), []
            return
        lane.wait = lane.wait or (each.start, each.cause)
        lane.is_played |= each.cause != SLOT

    def _add_part(self, each: Stretch, lane: _Lane) -> None:
        """Add a job for an interval of a trajectory's lane."""
        family = self._families[lane.kin.family]
        lane.is_played |= each.name == SCORING
        # A job is ready when its wait begins: the simulation recomputes how long it waits.
        ready = lane.wait[0] if lane.wait else each.start
        # The group waited for the first slot of its trajectories, and what it did between that and the start held the slot.
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
        """Add a job for an interval in the lane of a group or evaluation.

        Left out are what a group does between its wait for a slot and its first trajectory, and a span `scoring` that encloses
        those of its trajectories.
        """
        family = self._families[lane.kin.family]
        if family.opened_by is not None and lane.kin.family:
            family.opened_by.append(each.name)
            return
        at = bisect_left(family.scored, each.start)
        is_around = at < len(family.scored) and family.scored[at] <= each.end
        # A group's span of scoring that encloses those of its trajectories would count their work twice.
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
        self._works.append(Job(each.name, each.end - each.start, after, lag_us, place, place))
        self._times.append((each.start, each.end))
        lane.works.append(at)
        lane.ends.append(each.end)
        if lane.kin.is_part and not lane.is_played:
            self._plays[each.lane] = self._plays.get(each.lane, (at, at))[0], at

    def _came_after(self, each: Stretch, lane: _Lane, ready: int) -> tuple[tuple[int, ...], int]:
        """Return the indices of the jobs that an interval had to follow, and the microseconds between their end and `ready`."""
        is_join = (each.name == SCORING or not lane.kin.is_part) and not each.lane.startswith("v")
        own = lane.last(ready) if lane.works else None
        if own and (not is_join or ready - own[0] <= TOLERANCE_US):
            return (own[1],), max(0, ready - own[0])
        family = self._families[lane.kin.family]
        # What begins a trajectory came after what its group, or an earlier attempt of it, did.
        relatives = family.lanes if is_join else [*family.own[""], *family.own[_sample_from_lane(each.lane)]]
        before = [found for other in relatives if (found := other.last(ready))]
        # Groups begin one after another.
        if not before:
            at = bisect_right(self._of_groups, (ready + TOLERANCE_US, len(self._works)))
            before = self._of_groups[at - 1 : at]
        if not before:
            return (), ready - self._began
        ends, works = zip(*before, strict=True)
        return works, max(0, ready - max(ends))


def _sample_from_lane(name: str) -> str:
    """Return the trajectory that a lane belongs to, without attempt and scorer. Example: 7.3.1 and 7.3/exact give 7.3."""
    return ".".join(name.partition("/")[0].split(".")[:2])


def _is_wait_for_slot(each: Stretch) -> bool:
    return is_wait(each.name) and each.cause in PLACES


def _max_concurrent(times: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of (start, end) intervals that overlap at one instant, at least 1."""
    edges = sorted(edge for start, end in times if end > start for edge in ((start, 1), (end, -1)))
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return max(1, most)
