"""Watches over an event loop: how late its beats are, and what ran when one was."""

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasks.observe.garbage import GarbagePauses
from tasks.observe.lag import Beat, LagHistogram, LoopLag
from tasks.observe.lag_warnings import NO_PROCESSOR, LagWarnings
from tasks.observe.metrics import Metric
from tasks.observe.standing import where_it_stands

TICK_S = 0.01
LOOK_AFTER_S = 0.05
"""A beat that is so late has the loop's thread looked at, and again and again until it comes."""

MOST_PLACES = 50
"""Places that are told apart between two reports; what stands elsewhere counts as one."""

ELSEWHERE = "elsewhere"


class LoopMonitor:
    """Samples the running event loop every 10 ms, and warns of what held it up; takes about 1 % of a core.

    A thread looks where the loop's thread stands when a beat is 50 ms late.

    Args:
        max_stall_ms: a beat that is later is warned of; 0: none.
        max_lag_p99_ms: a report whose p99 is above is warned of; 0: none.
        warn: tells people; called on the loop.
        prefix: of the metrics' names.
    """

    def __init__(
        self, max_stall_ms: float, max_lag_p99_ms: float, warn: Callable[[str], None], prefix: str = "loop/"
    ) -> None:
        self._max_stall_ms, self._prefix = max_stall_ms, prefix
        self._warnings = LagWarnings(max_stall_ms, max_lag_p99_ms, warn)
        self._lag = LoopLag(TICK_S, self._heard)
        self._garbage = GarbagePauses()
        self._garbage_before_s = 0.0
        self._has_ended = threading.Event()
        self._seen: Counter[str] = Counter()
        self._places_s: defaultdict[str, float] = defaultdict(float)
        self._n_stalls = 0
        self._late = Beat(0.0, 0.0, 0.0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch over the running loop, in whose thread this is entered."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        watchdog = threading.Thread(
            target=self._watch, args=(loop, thread_id), name="loop-watchdog", daemon=True
        )
        with self._garbage.counted(), self._lag.sampled():
            watchdog.start()
            try:
                yield
            finally:
                self._has_ended.set()

    def report(self) -> Sequence[Metric]:
        """What was measured since the last report, nothing where nothing was; warns when the p99 is above its bound."""
        lags, self._lag.lags = self._lag.lags, LagHistogram()
        if not lags.n:
            return []
        values = {f"lag_p{percent}_ms": lags.percentile_ms(percent) for percent in (50, 90, 99)}
        values["lag_max_ms"] = lags.largest_ms
        if self._max_stall_ms:
            values["stalls"] = float(self._n_stalls)
        pauses = self._garbage.take()
        self._garbage_before_s = 0.0
        values |= {"gc_s": pauses.total_s, "gc_max_ms": 1000.0 * pauses.longest_s}
        self._warnings.of_step(values["lag_p99_ms"], self._late, self._places_s)
        self._n_stalls = 0
        self._late = Beat(0.0, 0.0, 0.0)
        self._places_s.clear()
        return [Metric(f"{self._prefix}{name}", "all", "value", value) for name, value in values.items()]

    def _heard(self, beat: Beat) -> None:
        """On the loop, once a beat has come."""
        seen, self._seen = self._seen, Counter()
        garbage_s = self._garbage.so_far.total_s
        garbage_ms, self._garbage_before_s = 1000.0 * (garbage_s - self._garbage_before_s), garbage_s
        beat = beat.looked_at(seen.total(), LOOK_AFTER_S)
        place = seen.most_common(1)[0][0] if seen else ""
        if beat.is_queued and place:
            place = NO_PROCESSOR  # wherever it stood, that did not hold it up
        if place:
            self._late += beat
            known = place in self._places_s or len(self._places_s) < MOST_PLACES
            self._places_s[place if known else ELSEWHERE] += beat.lag_ms / 1000.0
        if 0.0 < self._max_stall_ms < beat.lag_ms:
            self._n_stalls += 1
            self._warnings.of_stall(beat, place, garbage_ms)

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        """The watchdog's thread: sleeps until a beat would be late, and looks at the loop's thread while it is.

        A loop that stands still tells nobody, so that this is a matter of looking.
        """
        while not self._has_ended.is_set():
            due_s = self._lag.due_s
            late_s = time.monotonic() - due_s
            if late_s >= LOOK_AFTER_S:
                self._seen[where_it_stands(loop, thread_id)] += 1
            self._has_ended.wait(LOOK_AFTER_S if late_s >= 0.0 else min(LOOK_AFTER_S - late_s, 1.0))
