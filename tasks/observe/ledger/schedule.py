"""What a step's rollouts would have taken under other circumstances: the same pieces of work, scheduled once more.

Each piece of work has what it came after, and the place that it needed: a slot, a worker, a turn. Scheduled anew, first come,
first served, pieces that take less time, or places of which there are more, let those behind them begin sooner.
What a piece takes is taken not to depend on how many others go on beside it, so the outcome is what may be had at most.
"""

import heapq
from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

_ENDS, _IS_READY = 0, 1


class Work(NamedTuple):
    """A piece of work.

    Attributes:
        name: of its span.
        us: microseconds that it takes.
        after: what it came after, by the index in the schedule.
        lag_us: microseconds since the last of them, or since the beginning.
        takes: the place that it has to wait for; empty: none.
        gives: the place that is free again after it; empty: none.
    """

    name: str
    us: int
    after: tuple[int, ...]
    lag_us: int
    takes: str = ""
    gives: str = ""


class Schedule:
    """The work of a step.

    Args:
        works: all of it.
        places: how many there are, by their name.
    """

    def __init__(self, works: list[Work], places: Mapping[str, int]) -> None:
        self._works, self._places = works, places
        self._behind: list[list[int]] = [[] for _ in works]
        for at, work in enumerate(works):
            for before in work.after:
                self._behind[before].append(at)

    @property
    def places(self) -> Set[str]:
        """The names of places."""
        return self._places.keys()

    def less_us(self, shares: Mapping[str, float]) -> float:
        """Microseconds that all work together takes less: more than that nobody is done sooner."""
        return sum(work.us * (1.0 - shares[work.name]) for work in self._works if work.name in shares)

    def length_us(self, shares: Mapping[str, float], unlimited: Collection[str] = ()) -> int:
        """Microseconds until all is done.

        Args:
            shares: of its time that work of a name keeps; 1 for every other.
            unlimited: places that nobody has to wait for.
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
            if queues.get(work.gives):
                begin(heapq.heappop(queues[work.gives])[1])
            elif work.gives in free:
                free[work.gives] += 1
            for behind in self._behind[at]:
                left[behind] -= 1
                if not left[behind]:
                    heapq.heappush(turns, (now + self._works[behind].lag_us, _IS_READY, behind))
        return now
