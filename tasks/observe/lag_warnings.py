"""What is said of an event loop that was late: once of each cause, with what to do."""

from collections.abc import Callable, Mapping
from heapq import nlargest
from operator import itemgetter

from tasks.observe.lag import Beat

NO_PROCESSOR = "other threads or processes had all processors"
NOT_SEEN = "what ran was not seen"
MOST_WARNINGS = 50
NAMED_IN_A_WARNING = 3

FREE_A_PROCESSOR = "give the flow a core of its own, or run less beside it"
MOVE_IT = "move what computes there to processes of its own (score.workers, rollout.env_workers)"
DO_LESS = "record fewer task runs (observe.task_runs: groups), or share the step out (rollout.collectors)"


class LagWarnings:
    """Warns of stalls, once of each place, and of one step whose p99 is above its bound.

    A machine whose processors others have is told of once, be it for a stall or for a step: whose metrics show the rest.

    Args:
        max_stall_ms: what a stall is above.
        max_lag_p99_ms: a step whose p99 is above is warned of; 0: none.
        warn: tells people.
    """

    def __init__(self, max_stall_ms: float, max_lag_p99_ms: float, warn: Callable[[str], None]) -> None:
        self._max_stall_ms, self._max_lag_p99_ms, self._warn = max_stall_ms, max_lag_p99_ms, warn
        self._told: set[str] = set()
        self._has_told_of_step = False

    def of_stall(self, beat: Beat, place: str, garbage_ms: float) -> None:
        """Warn of a beat above the bound, of which so many ms were garbage collection; `place` is where the loop stood."""
        place = NO_PROCESSOR if beat.is_queued else place
        if place in self._told or len(self._told) >= MOST_WARNINGS:
            return
        self._told.add(place)
        garbage = f", {garbage_ms:.0f} ms of it collecting garbage" if garbage_ms >= 1.0 else ""
        self._warn(
            f"the event loop stood still for {beat.lag_ms:.0f} ms ({_spent(beat)}{garbage}), and observe.max_stall_ms "
            f"is {self._max_stall_ms:g}; {place or NOT_SEEN}: "
            f"{FREE_A_PROCESSOR if place == NO_PROCESSOR else MOVE_IT}"
        )

    def of_step(self, p99_ms: float, late: Beat, places_s: Mapping[str, float]) -> None:
        """Warn of a step's p99, the first time that it is above its bound.

        Args:
            p99_ms: of the step.
            late: all of its late beats, added up.
            places_s: seconds of lag by where the loop stood.
        """
        if not self._max_lag_p99_ms or p99_ms <= self._max_lag_p99_ms or self._has_told_of_step:
            return
        if late.is_queued:
            if NO_PROCESSOR in self._told:
                return
            self._told.add(NO_PROCESSOR)
        self._has_told_of_step = True
        most = nlargest(NAMED_IN_A_WARNING, places_s.items(), key=itemgetter(1))
        places = "".join(f"; {seconds:.1f} s {place}" for place, seconds in most)
        self._warn(
            f"the event loop was late by {p99_ms:.0f} ms (p99 of a step; all that was late: {_spent(late)}), and "
            f"observe.max_lag_p99_ms is {self._max_lag_p99_ms:g}{places}: "
            f"{FREE_A_PROCESSOR if late.is_queued else DO_LESS}"
        )


def _spent(beat: Beat) -> str:
    """What lag was spent on, in words."""
    parts = {
        "running": beat.running_ms,
        "waiting for a processor": beat.queued_ms,
        "waiting otherwise, for the interpreter's lock above all": beat.lag_ms
        - beat.running_ms
        - beat.queued_ms,
    }
    return ", ".join(f"{ms:.0f} ms {what}" for what, ms in parts.items() if ms >= 1.0)
