"""What is said of an event loop that was late: once of each cause, with what to do."""

import re
from collections.abc import Callable, Mapping
from heapq import nlargest
from operator import itemgetter

from tasks.observe.lag import Beat

NO_PROCESSOR = "other threads or processes had all processors"
NOT_SEEN = "what ran was not seen"
MOST_WARNINGS = 50
MOST_STEP_WARNINGS = 10
NAMED_IN_A_WARNING = 3
GROWN = 1.5
"""A step that is late by so many times what was told last is told of again."""

FREE_A_PROCESSOR = "give the flow a core of its own, or run less beside it"
AWAIT_IT = "make the call asynchronous, or await it in a thread (asyncio.to_thread)"
MOVE_IT = "move what computes there to processes of its own (score.workers, rollout.env_workers)"
DO_LESS = "record fewer task runs (observe.task_runs: groups), or share the step out (rollout.collectors)"


class LagWarnings:
    """Warns of stalls, once of each place, and of steps whose p99 is above its bound.

    A machine whose processors others have is told of once, be it for a stall or for a step: whose metrics show the rest.
    A step that our own work made late is told of again when it is later by half, or late in another place.

    Args:
        max_stall_ms: what a stall is above.
        max_lag_p99_ms: a step whose p99 is above is warned of; 0: none.
        warn: tells people.
    """

    def __init__(self, max_stall_ms: float, max_lag_p99_ms: float, warn: Callable[[str], None]) -> None:
        self._max_stall_ms, self._max_lag_p99_ms, self._warn = max_stall_ms, max_lag_p99_ms, warn
        self._told: set[str] = set()
        self._told_of_steps: set[str] = set()
        self._n_of_steps, self._told_p99_ms = 0, 0.0

    def of_stall(self, beat: Beat, place: str, garbage_ms: float) -> None:
        """Warn of a beat above the bound, of which so many ms were garbage collection; `place` is where the loop stood."""
        place = NO_PROCESSOR if beat.is_queued else place
        if _site(place) in self._told or len(self._told) >= MOST_WARNINGS:
            return
        self._told.add(_site(place))
        garbage = f", {garbage_ms:.0f} ms of it collecting garbage" if garbage_ms >= 1.0 else ""
        self._warn(
            f"the event loop stood still for {beat.lag_ms:.0f} ms ({_spent(beat)}{garbage}), and observe.max_stall_ms "
            f"is {self._max_stall_ms:g}; {place or NOT_SEEN}: {_remedy(beat, MOVE_IT)}"
        )

    def of_step(self, p99_ms: float, late: Beat, places_s: Mapping[str, float]) -> None:
        """Warn of a step's p99 that is above its bound.

        Args:
            p99_ms: of the step.
            late: all of its late beats, added up.
            places_s: seconds of lag by where the loop stood.
        """
        most = nlargest(NAMED_IN_A_WARNING, places_s.items(), key=itemgetter(1))
        first = _site(most[0][0]) if most else ""
        if not self._max_lag_p99_ms or p99_ms <= self._max_lag_p99_ms:
            return
        if not (self._is_first_of_a_busy_machine() if late.is_queued else self._is_news(p99_ms, first)):
            return
        places = "".join(f"; {seconds:.1f} s {place}" for place, seconds in most)
        self._warn(
            f"the event loop was late by {p99_ms:.0f} ms (p99 of a step; all that was late: {_spent(late)}), and "
            f"observe.max_lag_p99_ms is {self._max_lag_p99_ms:g}{places}: {_remedy(late, DO_LESS)}"
        )

    def _is_first_of_a_busy_machine(self) -> bool:
        is_first = NO_PROCESSOR not in self._told
        self._told.add(NO_PROCESSOR)
        return is_first

    def _is_news(self, p99_ms: float, site: str) -> bool:
        """True when our own work made a step later than was told, or in a place that was not; notes that it is told."""
        is_known = site in self._told_of_steps and p99_ms <= GROWN * self._told_p99_ms
        if is_known or self._n_of_steps >= MOST_STEP_WARNINGS:
            return False
        self._told_of_steps.add(site)
        self._n_of_steps += 1
        self._told_p99_ms = max(self._told_p99_ms, p99_ms)
        return True


def _site(place: str) -> str:
    """A place without what differs from one time to the next: the task's name, lines, and what was called last.

    Example: "task score-3 (score) stood in tasks/score/part.py:40 score, json/decoder.py:353 decode" is at
        "tasks/score/part.py score".
    """
    return re.sub(r":\d+ ", " ", place.partition(" stood in ")[2].partition(",")[0]) or place


def _spent(beat: Beat) -> str:
    """What lag was spent on, in words."""
    parts = {
        "running": beat.running_ms,
        "waiting for a processor": beat.queued_ms,
        "blocked in a call": beat.blocked_ms,
        "waiting otherwise, for the interpreter's lock above all": beat.waiting_ms,
    }
    return ", ".join(f"{ms:.0f} ms {what}" for what, ms in parts.items() if ms >= 1.0)


def _remedy(beat: Beat, less: str) -> str:
    """What to do about lag; `less` is for our own work."""
    if beat.is_queued:
        return FREE_A_PROCESSOR
    return AWAIT_IT if beat.is_blocked else less
