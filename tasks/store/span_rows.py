"""Stores recorded spans in the data set `spans`, by step, without delaying what they measure."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
import pyarrow as pa

from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.observe.spans import OpenSpan, Span, current_lane, recording
from rollmill.tasks.observe.step_clock import current_recorder
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter

_NS_IN_US = 1000
_US_IN_S = 1_000_000


class RunSpans:
    """Records the spans (timed intervals) of a run's flow, and of processes that report to it, and stores them in the run.

    An async context manager, used inside that of the run's writer; when it is left, it stores the remaining spans. A
    recorder that is active already is used, so that spans from before the run are stored too.

    Attributes:
        recorder: keeps the spans until they are stored.
        on_stored: called with the number of a step when its spans are stored.
    """

    def __init__(self, run: str, writer: RunWriter) -> None:
        self.recorder = current_recorder()
        self._run, self._writer, self._step = run, writer, 0
        self._recording = recording(self.recorder)
        self.on_stored: Callable[[int], object] = lambda _: None
        self._closing: OpenSpan | None = None

    async def __aenter__(self) -> Self:
        self._recording.__enter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._closing is not None:
            self._closing.end()
        self._recording.__exit__(None, None, None)
        self.recorder.end()
        for step, rows in rows_by_step(self._run, self.recorder.take(), self._step).items():
            self._writer.append("spans", rows, step=step)

    def close(self) -> None:
        """Begin the span named `closing`, which ends when this context manager is left."""
        self._closing = OpenSpan("closing").begin(current_lane())

    def count_lost(self) -> Metric:
        """Return a metric: the number of spans that were dropped because too many were waiting to be stored."""
        return Metric("observe/spans_lost_so_far", ALL, "value", float(self.recorder.n_lost))

    async def store(self, step: int) -> None:
        """Store the spans recorded so far, each under its step, and under `step` those that have none.

        Spans that are recorded later for this step are stored with the next one, or at the end.

        Raises:
            StoreError: the spans could not be stored.
        """
        taken, self._step = self.recorder.take(), step
        by_step = await asyncio.to_thread(rows_by_step, self._run, taken, step)
        await asyncio.gather(
            *(self._writer.store("spans", rows, step=each) for each, rows in by_step.items())
        )
        self.on_stored(step)


def rows_by_step(run: str, spans: Sequence[Span], step: int) -> Mapping[int, pa.RecordBatch]:
    """Convert spans to rows of the data set `spans`, by step; spans without a step get `step`."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step if span.step >= 0 else step].append(span)
    return {each: _span_rows(run, each, found) for each, found in sorted(by_step.items())}


def _span_rows(run: str, step: int, spans: Sequence[Span]) -> pa.RecordBatch:
    processes, lanes, names, _, started, durations, causes, *_ = zip(*spans, strict=True)
    started_ns = np.array(started, np.int64)
    # Both ends are truncated: rounding the duration could make a nested span end after the span around it.
    started_us = started_ns // _NS_IN_US
    ended_us = (started_ns + np.array(durations, np.int64)) // _NS_IN_US
    return make_batch(
        "spans",
        {
            "run": [run] * len(spans),
            "step": np.full(len(spans), step, np.int32),
            "process": processes,
            "lane": lanes,
            "name": names,
            "cause": causes,
            "started_at": pa.array(started_us).cast(pa.timestamp("us", tz="UTC")),
            "duration_s": (ended_us - started_us) / _US_IN_S,
        },
    )
