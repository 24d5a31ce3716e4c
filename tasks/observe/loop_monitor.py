"""Monitor an event loop: its lag, garbage-collection pauses, and warnings about both with a remedy."""

import gc
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from heapq import nlargest
from operator import itemgetter

from rollmill.tasks.observe.loop_lag import Beat, LagHistogram, LoopLag
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.stack_sites import StallSampler

TICK_S = 0.01
# A beat that is later counts as late, and its cause is sampled at this interval. Shorter delays are common and harmless.
LATE_S = 0.05
# Beats of a step below which its p99 is not judged: it would be the mean of a few beats. These are 10 s.
MIN_JUDGED_BEATS = 1000
# Distinct stack sites between two reports; all further ones count as `elsewhere`, so that memory does not grow.
MOST_SITES = 50
ELSEWHERE = "elsewhere"

NO_PROCESSOR = "other threads or processes used all CPUs"
MOST_WARNINGS = 50
MOST_STEP_WARNINGS = 10
NAMED_IN_A_WARNING = 3
# A step is reported again if its lag is this many times the last one reported.
GROWN = 1.5

FREE_A_PROCESSOR = "reserve a core for the flow, or run fewer other processes"
AWAIT_IT = "make the call asynchronous, or await it in a thread (asyncio.to_thread)"
MOVE_IT = "move that computation to worker processes (score.workers, rollout.env_workers)"
DO_LESS = "record fewer task runs (observe.task_runs: groups)"
FIND_IT = "observe.diagnostics: true names the code"


class GarbageTimer:
    """Times garbage collections, which stop all threads of the process.

    Attributes:
        totals_s: seconds of all collections, and of the longest one, since the last `take`.
    """

    def __init__(self) -> None:
        self.totals_s = (0.0, 0.0)
        self._started_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the collections inside the `with` block."""
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)

    def take(self) -> tuple[float, float]:
        """Return `totals_s` and reset them."""
        taken, self.totals_s = self.totals_s, (0.0, 0.0)
        return taken

    def _on_collection(self, phase: str, _: Mapping[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._started_s = now_s
        # Without a start this is the end of a collection during which the timer was added.
        elif self._started_s:
            pause_s = now_s - self._started_s
            total_s, longest_s = self.totals_s
            self.totals_s = (total_s + pause_s, max(longest_s, pause_s))


class LoopMonitor:
    """Measures the running event loop every 10 ms and warns of stalls; costs about 1 % of a core.

    Args:
        max_stall_ms: warn of a beat that is later than this, without the time in which other processes had all CPUs; 0: never.
        max_lag_p99_ms: warn of a report with at least `MIN_JUDGED_BEATS` beats whose p99 lag is above this; 0: never.
        warn: receives the warning; called on the loop.
        prefix: prefix of the metrics' names.
        get_phase: returns what the step is doing, which warnings name; empty if unknown.
        samples_stacks: True to sample the stacks of a late loop from a second thread, so that warnings name the code.
    """

    def __init__(
        self,
        max_stall_ms: float,
        max_lag_p99_ms: float,
        warn: Callable[[str], None],
        prefix: str = "loop/",
        get_phase: Callable[[], str] = str,
        *,
        samples_stacks: bool = False,
    ) -> None:
        self._max_stall_ms, self._prefix = max_stall_ms, prefix
        self._warnings = LagWarnings(max_stall_ms, max_lag_p99_ms, warn)
        self._lag = LoopLag(TICK_S, self._on_beat)
        # Off by default: stack walks of running threads have twice ended or hung a run.
        self._sampler = StallSampler(self._lag, LATE_S) if samples_stacks else None
        self._garbage = GarbageTimer()
        self._garbage_before_s = 0.0
        self._get_phase = get_phase
        self._sites_s: defaultdict[str, float] = defaultdict(float)
        self._phases_s: defaultdict[str, float] = defaultdict(float)
        self._n_stalls = 0
        self._late = Beat(0.0, 0.0, 0.0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Monitor the running loop inside the `with` block; enter it in the loop's thread."""
        sampling = self._sampler.sample() if self._sampler else nullcontext()
        with self._garbage.measure(), self._lag.sample(), sampling:
            yield

    def report(self) -> Sequence[Metric]:
        """Return the metrics since the last report; empty without a beat. Warns of a p99 lag above its bound."""
        lags, self._lag.lags = self._lag.lags, LagHistogram()
        if not lags.n:
            return []
        values = {f"lag_p{percent}_ms": lags.percentile_ms(percent) for percent in (50, 90, 99)}
        values["lag_max_ms"] = lags.largest_ms
        if self._max_stall_ms:
            values["stalls"] = float(self._n_stalls)
        total_s, longest_s = self._garbage.take()
        self._garbage_before_s = 0.0
        values |= {"gc_s": total_s, "gc_max_ms": 1000.0 * longest_s}
        phase = max(self._phases_s, key=self._phases_s.__getitem__, default="")
        if lags.n >= MIN_JUDGED_BEATS:
            self._warnings.warn_of_step(values["lag_p99_ms"], self._late, self._sites_s, phase)
        self._n_stalls = 0
        self._late = Beat(0.0, 0.0, 0.0)
        self._sites_s.clear()
        self._phases_s.clear()
        return [Metric(f"{self._prefix}{name}", "all", "value", value) for name, value in values.items()]

    def _on_beat(self, beat: Beat) -> None:
        self.record(beat, self._sampler.take() if self._sampler else None)

    def record(self, beat: Beat, seen: Counter[str] | None = None) -> None:
        """Count a beat in the metrics, and warn if it is a stall; `seen` counts the stack sites sampled since the last beat."""
        garbage_s, _ = self._garbage.totals_s
        garbage_ms, self._garbage_before_s = 1000.0 * (garbage_s - self._garbage_before_s), garbage_s
        beat = beat.with_blocked(seen.total(), LATE_S) if seen else beat
        site = seen.most_common(1)[0][0] if seen else ""
        # A thread without a CPU is in code that does not cause the lag.
        site = NO_PROCESSOR if beat.is_queued else site
        if beat.lag_ms >= 1000.0 * LATE_S:
            self._late += beat
            known = site in self._sites_s or len(self._sites_s) < MOST_SITES
            self._sites_s[site if known else ELSEWHERE] += beat.lag_ms / 1000.0
            self._phases_s[self._get_phase()] += beat.lag_ms / 1000.0
        if 0.0 < self._max_stall_ms < beat.lag_ms:
            self._n_stalls += 1
        # On a busy machine the loop waits for a CPU: that is judged by step, since a single delay harms nothing.
        if 0.0 < self._max_stall_ms < beat.lag_ms - beat.queued_ms:
            self._warnings.warn_of_stall(beat, site, garbage_ms, self._get_phase())


class LagWarnings:
    """Warns of stalls, once for each cause, and of steps whose p99 lag is above its bound.

    A cause is a stack site, or without samples what the lag mostly consists of. A busy machine is reported once, for a stall or for
    a step; the metrics show the rest. A step that our own work delayed is reported again if its lag grows by 50 % or its stack site
    changes.

    Args:
        max_stall_ms: a longer delay is a stall.
        max_lag_p99_ms: warn of a step whose p99 lag is above this; 0: never.
        warn: receives the warning.
    """

    def __init__(self, max_stall_ms: float, max_lag_p99_ms: float, warn: Callable[[str], None]) -> None:
        self._max_stall_ms, self._max_lag_p99_ms, self._warn = max_stall_ms, max_lag_p99_ms, warn
        self._reported: set[str] = set()
        self._reported_of_steps: set[str] = set()
        self._n_of_steps, self._reported_p99_ms = 0, 0.0

    def warn_of_stall(self, beat: Beat, site: str, garbage_ms: float, phase: str = "") -> None:
        """Warn of a beat that was later than the bound, once for each cause.

        `site` is the stack site that was sampled most during it, if any; `garbage_ms` the time in which garbage was collected; `phase`
        what the step was doing.
        """
        key = _site_key(site) or max(_lag_parts(beat).items(), key=itemgetter(1))[0]
        if key in self._reported or len(self._reported) >= MOST_WARNINGS:
            return
        self._reported.add(key)
        garbage = f", {garbage_ms:.0f} ms of it collecting garbage" if garbage_ms >= 1.0 else ""
        cause = f"{site}; " * bool(site)
        self._warn(
            f"event loop blocked for {beat.lag_ms:.0f} ms{_describe_phase(phase)} (limit {self._max_stall_ms:g}): "
            f"{_describe_lag(beat)}{garbage}; {cause}{_remedy(beat, site, MOVE_IT)}"
        )

    def warn_of_step(self, p99_ms: float, late: Beat, sites_s: Mapping[str, float], phase: str = "") -> None:
        """Warn of a step if its p99 lag is above `max_lag_p99_ms` and was not reported yet; otherwise do nothing.

        Args:
            p99_ms: 99th percentile of the step's lag.
            late: sum of the step's late beats.
            sites_s: seconds of lag by stack site; "" has those that were not sampled.
            phase: what the step was doing during most of the lag; empty if that is not known.
        """
        known = [each for each in sites_s.items() if each[0] not in ("", NO_PROCESSOR)]
        most = nlargest(NAMED_IN_A_WARNING, known, key=itemgetter(1))
        first = most[0][0] if most else ""
        if not self._max_lag_p99_ms or p99_ms <= self._max_lag_p99_ms:
            return
        if late.is_queued:
            if NO_PROCESSOR in self._reported:
                return
            self._reported.add(NO_PROCESSOR)
        elif not self._is_news(p99_ms, _site_key(first)):
            return
        sites = "".join(f"; {seconds:.1f} s {site}" for site, seconds in most)
        # On a busy machine the sites in our code are where the thread happened to lose its CPU.
        cause = NO_PROCESSOR if late.is_queued else f"{_describe_lag(late)}{sites}"
        self._warn(
            f"event loop lag {p99_ms:.0f} ms{_describe_phase(phase)} (p99; limit {self._max_lag_p99_ms:g}): {cause}; "
            f"{_remedy(late, first, DO_LESS)}"
        )

    def _is_news(self, p99_ms: float, site: str) -> bool:
        """Return True, and remember both, if a step's p99 lag grew by 50 % or its stack site is new.

        Return False once the largest number of warnings is reached.
        """
        is_known = site in self._reported_of_steps and p99_ms <= GROWN * self._reported_p99_ms
        if is_known or self._n_of_steps >= MOST_STEP_WARNINGS:
            return False
        self._reported_of_steps.add(site)
        self._n_of_steps += 1
        self._reported_p99_ms = max(self._reported_p99_ms, p99_ms)
        return True


def _site_key(site: str) -> str:
    """Reduce a stack site to file and function, which are the same each time.

    Example: "task score-3 (score) in tasks/score/scoring.py:40 score, json/decoder.py:353 decode" gives
        "tasks/score/scoring.py score".
    """
    return re.sub(r":\d+ ", " ", site.partition(" in ")[2].partition(",")[0]) or site


def _lag_parts(beat: Beat) -> dict[str, float]:
    return {
        "running": beat.running_ms,
        "waiting for a CPU": beat.queued_ms,
        "blocked in a call": beat.blocked_ms,
        "waiting, in a call or for the GIL": beat.waiting_ms,
    }


def _describe_lag(beat: Beat) -> str:
    parts = sorted(_lag_parts(beat).items(), key=itemgetter(1), reverse=True)
    return ", ".join(f"{ms:.0f} ms {what}" for what, ms in parts if ms >= 1.0)


def _describe_phase(phase: str) -> str:
    return f" during {phase}" if phase else ""


def _remedy(beat: Beat, site: str, less: str) -> str:
    """Return advice against a late beat; `less` is the advice if our own code kept the CPU busy."""
    if beat.is_queued:
        return FREE_A_PROCESSOR
    if site:
        return AWAIT_IT if beat.is_blocked else less
    # Without samples a wait may as well be for the lock of the interpreter, which another thread holds.
    return f"{less}; {FIND_IT}" if 2.0 * beat.running_ms > beat.lag_ms else FIND_IT
