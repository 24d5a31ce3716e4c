"""A run's spans on their way into the data set `spans`: by step, and never in the way of what they measure."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from tasks.observe.metrics import ALL, Metric
from tasks.observe.run_line import recorder_here
from tasks.observe.spans import OpenSpan, Span, current_lane, recording
from tasks.store.schemas import batch_of
from tasks.store.writer import RunWriter

_NS_IN_US = 1000
_US_IN_S = 1_000_000


class RunSpans:
    """Takes the spans of a run, its flow's and those of other processes that it was told, to the run's writer.

    An async context manager, inside of the writer's: what is done inside is recorded, and what is left at the end stored.
    Where something is recorded already, what is known of the time before goes with it.

    Args:
        run: id of the run.
        writer: of the run.

    Attributes:
        recorder: keeps the spans until they are stored.
        tell: told the number of a step whose spans are stored.
    """

    def __init__(self, run: str, writer: RunWriter) -> None:
        self.recorder = recorder_here()
        self._run, self._writer, self._step = run, writer, 0
        self._recording = recording(self.recorder)
        self.tell: Callable[[int], object] = lambda _: None
        self._closing: OpenSpan | None = None

    async def __aenter__(self) -> Self:
        self._recording.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closing is not None:
            self._closing.end()
        self._recording.__exit__(None, None, None)
        self.recorder.end()
        for step, rows in rows_by_step(self._run, self.recorder.take(), self._step).items():
            self._writer.append("spans", rows, step=step)

    def close(self) -> None:
        """Book what is left to be done to `closing`."""
        self._closing = OpenSpan("closing").begin(current_lane())

    def lost(self) -> Metric:
        """How many spans so far were let go of since too many were kept."""
        return Metric("observe/spans_lost_so_far", ALL, "value", float(self.recorder.n_lost))

    async def store(self, step: int) -> None:
        """Store what was recorded so far, each span with its step, and with this one what was done for none.

        What is recorded of a step later is stored with the next one, or at the end.

        Raises:
            StoreError: the spans could not be stored.
        """
        taken, self._step = self.recorder.take(), step
        by_step = await asyncio.to_thread(rows_by_step, self._run, taken, step)
        await asyncio.gather(
            *(self._writer.append("spans", rows, step=each) for each, rows in by_step.items())
        )
        self.tell(step)


def rows_by_step(run: str, spans: Sequence[Span], step: int) -> Mapping[int, pa.RecordBatch]:
    """Rows of the data set `spans`, by step; those that were done for no step are this one's.

    Start and end are cut to microseconds alike, so that spans which lie inside one another, or apart, still do.
    """
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step if span.step >= 0 else step].append(span)
    return {each: _rows(run, each, found) for each, found in sorted(by_step.items())}


def _rows(run: str, step: int, spans: Sequence[Span]) -> pa.RecordBatch:
    processes, lanes, names, _, started, durations, causes = zip(*spans, strict=True)
    started_ns = np.array(started, np.int64)
    started_us = started_ns // _NS_IN_US
    ended_us = (started_ns + np.array(durations, np.int64)) // _NS_IN_US
    return batch_of(
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
