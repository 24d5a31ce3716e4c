"""The walk back over a step's pieces: from what ended last to what it had waited for, and so on."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from tasks.observe.ledger.lanes import Kin
from tasks.observe.ledger.timeline import is_wait

SLOTS = {"slot": "generating", "workers": "scoring", "calls": "scoring"}
"""What a place is used for that a wait is for, by its cause: somebody else does so until then."""


class Segment(NamedTuple):
    """A stretch of the path: a piece of the timeline, or -1 where it is the step's line itself."""

    piece: int
    start: int
    end: int


class Told(NamedTuple):
    """A piece with its words: its index, lane, start, end, name, cause."""

    piece: int
    lane: int
    start: int
    end: int
    name: str
    cause: str


_end = attrgetter("end")


class Walk:
    """One walk back through pieces, which are in the order of their ends.

    Args:
        pieces: that may be walked over.
        lanes_of: the lanes of each process, `main` first.
        kin: of each lane.
        follows_senders: where a lane begins, what another is in the midst of had it begin, as a sender does a receiver.
    """

    def __init__(
        self, pieces: list[Told], lanes_of: dict[str, list[int]], kin: list[Kin], *, follows_senders: bool
    ) -> None:
        self._lanes_of, self._pieces, self._follows_senders = lanes_of, pieces, follows_senders
        self._kin, self._of_kin = kin, dict[Kin, list[Told]]()
        self._of_lane: dict[int, list[Told]] = {}
        self._of_name: dict[str, list[Told]] = {}
        self._of_groups: list[Told] = []
        self._lanes_beside = {lane: lanes for lanes in lanes_of.values() for lane in lanes}
        for each in pieces:
            self._of_lane.setdefault(each.lane, []).append(each)
            self._of_kin.setdefault(kin[each.lane], []).append(each)
            self._of_name.setdefault(each.name, []).append(each)
            if kin[each.lane].family and not kin[each.lane].is_part:
                self._of_groups.append(each)

    def back(self, start: int, end: int) -> Iterator[Segment]:
        """The segments from `end` to `start`, the last first."""
        time, held = end, self._pieces[-1] if self._pieces else None
        while time > start:
            if held is None or held.end <= start:
                yield Segment(-1, start, time)
                return
            if held.end < time:  # nobody had it in between
                yield Segment(-1, held.end, time)
                time = held.end
            before = self._released_by(held, time)
            until = max(start, held.start)
            if before is not None and is_wait(held.name):
                until = max(until, min(time, before.end))
            yield Segment(held.piece, until, time)
            time, held = until, before

    def _released_by(self, held: Told, time: int) -> Told | None:
        """What the path goes on with before a piece, or before `time` where it is a wait."""
        before = self._covering(held.lane, held.start)
        if not is_wait(held.name):
            return before or self._sender(held) or self._earlier(held)
        if other := self._waited_for(held, time):
            return other
        last = self._had(SLOTS[held.cause], time, held.lane) if held.cause in SLOTS else None
        return last if last and last.end > held.start else before

    def _waited_for(self, held: Told, time: int) -> Told | None:
        """What the process that a wait is for had in hand; where that waited too, the one that it waited for."""
        seen, cause = set[str](), held.cause
        while cause in self._lanes_of and cause not in seen:
            seen.add(cause)
            had = [each for lane in self._lanes_of[cause] if (each := self._in_hand(lane, held.start, time))]
            if work := [each for each in had if not is_wait(each.name)]:
                return max(work, key=lambda each: min(each.end, time))
            cause = had[0].cause if had else ""
        return None

    def _in_hand(self, lane: int, since: int, time: int) -> Told | None:
        """The piece of a lane before `time`, or the last one before a pause there that nobody has; none from before `since`."""
        last = self._covering(lane, time) or self._last(self._of_lane.get(lane, []), time)
        return last if last and last.end >= since else None

    def _had(self, name: str, time: int, lane: int) -> Told | None:
        """The piece of this name that was last to end until then, in another lane."""
        of_name = self._of_name.get(name, [])
        at = bisect_right(of_name, time, key=_end)
        return next((of_name[each] for each in range(at - 1, -1, -1) if of_name[each].lane != lane), None)

    def _earlier(self, held: Told) -> Told | None:
        """What a lane did last, after a pause that nobody has; in a group's lane that is where its trajectories were.

        Groups begin one after another: before a group's first piece there is what was last done for another one. Before what
        a rank or server did is what it did last in any of its lanes.
        """
        kin = self._kin[held.lane]
        is_others = kin.is_part and not kin.family
        lanes = self._lanes_beside[held.lane] if is_others else [held.lane]
        ended = [last for lane in lanes if (last := self._last(self._of_lane.get(lane, []), held.start))]
        own = max(ended, key=_end, default=None)
        if own and kin.is_part:
            return own
        if own is None and kin.family and not kin.is_part:
            began = [self._of_kin.get(Kin("", is_part=False), []), self._of_groups]
            before = [last for pieces in began if (last := self._last(pieces, held.start))]
            return max(before, key=_end, default=None)
        for related in (Kin(kin.family, not kin.is_part), Kin("", is_part=False)):
            others = self._of_kin.get(related, []) if related != kin else []
            if last := self._last(others, held.start):
                return max([last, *([own] if own else [])], key=_end)
        return own

    def _last(self, pieces: list[Told], time: int) -> Told | None:
        """The last of these to end until then."""
        at = bisect_right(pieces, time, key=_end)
        return pieces[at - 1] if at else None

    def _sender(self, held: Told) -> Told | None:
        """What another lane was in the midst of when this one began."""
        lanes = self._of_lane.keys() - {held.lane} if self._follows_senders else ()
        active = [each for lane in lanes if (each := self._covering(lane, held.start))]
        return min(active, key=lambda each: each.piece, default=None)

    def _covering(self, lane: int, time: int) -> Told | None:
        """The piece of a lane that holds the instant before `time`."""
        of_lane = self._of_lane.get(lane, [])
        at = bisect_left(of_lane, time, key=_end)
        return of_lane[at] if at < len(of_lane) and of_lane[at].start < time else None
