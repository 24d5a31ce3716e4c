"""Send a run's spans to OpenTelemetry: one trace for each attempt at a step."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import polars as pl
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from rollmill.tasks.errors import RequestError
from rollmill.tasks.look.ledger.run_ledger import read_attempt_spans, select_steps
from rollmill.tasks.look.ledger.span_timeline import FLOW, LINE, WHOLE, build_timeline
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest


def split_attempts(rows: pl.DataFrame, steps: list[int], *, is_over: bool) -> pl.DataFrame:
    """Number the attempts of each step, and add a span `step` around each attempt that lacks one.

    A killed attempt has no span `step`: it gets one from its first to its last span.

    Args:
        rows: rows of the data set `spans`: of these steps, of the previous ones that may run concurrently, and of the next.
        steps: the steps to return.
        is_over: True: the last attempt gets such a span too. False: it is still running and will report its own.

    Returns:
        The spans of a timeline with a column `attempt`, from 0 for each step's first; by lane and start, outer spans first.
    """
    spans = build_timeline(rows).spans.rename({"attempt": "nth"})
    selected = spans.filter(pl.col("step").is_in(steps))
    selected = selected.join(_number_attempts(selected), on=["step", "nth"], maintain_order="left")
    is_whole = (pl.col("process") == FLOW) & (pl.col("lane") == LINE) & (pl.col("name") == WHOLE)
    unfinished = selected.join(selected.filter(is_whole), on=["step", "attempt"], how="anti")
    by = unfinished.group_by("step", "attempt")
    extents = by.agg(pl.col("start").min(), pl.col("end").max(), pl.col("nth").min())
    extents = extents.filter((pl.col("nth") < spans["nth"].max()) | pl.lit(is_over))
    texts = {"process": FLOW, "lane": LINE, "name": WHOLE, "cause": ""}
    around = extents.with_columns(
        *(pl.lit(text).alias(name) for name, text in texts.items()), lane_id=pl.lit(-1)
    )
    return pl.concat([around.select(selected.columns).cast(selected.schema), selected]).drop("nth")


def _number_attempts(spans: pl.DataFrame) -> pl.DataFrame:
    """Number the attempts at each step: columns step, nth (of the run's flow processes), attempt (at the step, from 0).

    A flow process in which only the trainer re-applied the step's batch is no attempt at the step.
    """
    by_process = spans.group_by("step", "nth").agg((pl.col("process") == FLOW).any().alias("is_attempt"))
    attempt = (pl.col("is_attempt").cum_sum().over("step").cast(pl.Int64) - 1).clip(0)
    return by_process.sort("step", "nth").select("step", "nth", attempt.alias("attempt"))


BATCH = 1000
"""Most spans in one request."""
NS_PER_US = 1000
OTLP_TIMEOUT_S = 30.0
"""Timeout in seconds for each request of `send_otlp`."""
TRACES = "/v1/traces"
"""Path of a receiver's trace endpoint."""

# This module reports failures itself.
logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)


def export_traces(
    spans: pl.DataFrame,
    steps: list[int],
    run: str,
    name: str,
    endpoint: str,
    timeout_s: float,
    *,
    known: set[int] | None = None,
    is_over: bool = True,
) -> int:
    """Send the spans of some steps to an OpenTelemetry receiver and return their number; one that is sent again has the same id.

    Headers are configured by the library's variables, such as OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        spans: rows of the data set, of these steps and their neighbours.
        steps: the steps whose spans are sent.
        run: random id of the run.
        name: name of the run.
        endpoint: receiver of OTLP over HTTP, such as http://127.0.0.1:4318.
        timeout_s: seconds for each request, including the library's retries.
        known: ids of spans the receiver has, which are not sent; ids of sent spans are added.
        is_over: True if the steps have ended: attempts without a span `step` get one.

    Raises:
        RequestError: the receiver did not accept them.
    """
    rows = split_attempts(spans, steps, is_over=is_over)
    known = set() if known is None else known
    new = [each for each in _readable_spans(rows, run, name) if each.context.span_id not in known]
    return send_spans(endpoint, new, timeout_s, known)


def send_spans(
    endpoint: str, spans: Sequence[ReadableSpan], timeout_s: float, known: set[int] | None = None
) -> int:
    """Send spans to a receiver, and return their number; see `export_traces`, also for `known`.

    Raises:
        RequestError: the receiver did not accept them.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}{TRACES}"
    exporter = OTLPSpanExporter(url, timeout=timeout_s)
    try:
        for at in range(0, len(spans), BATCH):
            batch = spans[at : at + BATCH]
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                remedy = "start a receiver of OTLP over HTTP there, or correct the address"
                raise RequestError(f"{url} did not accept the spans; {at} were sent: {remedy}")
            if known is not None:
                known.update(each.context.span_id for each in batch)
    finally:
        exporter.shutdown()
    return len(spans)


def send_otlp(folder: RunFolder, asked: Interval | None, endpoint: str) -> str:
    """Send the spans of the steps `asked`, or of the last ones, to a receiver; return a line with the number of spans sent.

    Raises:
        ConfigError: no such step or spans.
        RequestError: the receiver did not accept them.
    """
    steps = select_steps(folder, asked)
    spans = read_attempt_spans(folder, steps)
    n = export_traces(spans, steps, read_manifest(folder).run, folder.name, endpoint, OTLP_TIMEOUT_S)
    return f"{count_noun(n, 'span')} sent to {endpoint}"


def _readable_spans(spans: pl.DataFrame, run: str, name: str) -> Iterator[ReadableSpan]:
    """Yield spans as OpenTelemetry's ReadableSpan, each with its enclosing span as parent."""
    resources: dict[str, Resource] = {}
    lane, around = -1, list[tuple[int, SpanContext]]()
    for row in spans.iter_rows(named=True):
        if row["lane_id"] != lane:
            lane, around = row["lane_id"], []
        while around and around[-1][0] <= row["start"]:
            around.pop()
        resource = resources.setdefault(row["process"], _resource(run, name, row["process"]))
        context = _context(run, row)
        root = _context(run, row | {"process": FLOW, "lane": LINE, "name": WHOLE})
        above = [each for _, each in around if each.trace_id == context.trace_id]
        outer = above[-1] if above else root
        yield ReadableSpan(
            row["name"],
            context=context,
            parent=outer if outer.span_id != context.span_id else None,
            resource=resource,
            attributes={key: row[key] for key in ("step", "lane", "cause") if row[key] != ""},
            start_time=row["start"] * NS_PER_US,
            end_time=row["end"] * NS_PER_US,
        )
        around.append((row["end"], context))


def _resource(run: str, name: str, process: str) -> Resource:
    return Resource(
        {"service.name": "rollmill", "service.instance.id": process, "run": run, "run.name": name}
    )


def _context(run: str, row: Mapping[str, object]) -> SpanContext:
    """Return a span's OpenTelemetry ids, hashed from the run and the span, so that they are the same each time."""
    trace = hashlib.blake2b(f"{run} {row['step']}".encode(), digest_size=16).digest()
    is_whole = (row["process"], row["lane"], row["name"]) == (FLOW, LINE, WHOLE)
    when = row["attempt"] if is_whole else row["start"]
    place = f"{row['process']} {row['lane']} {row['name']} {when}"
    span = hashlib.blake2b(trace + place.encode(), digest_size=8).digest()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int.from_bytes(trace), int.from_bytes(span), is_remote=False, trace_flags=sampled)
