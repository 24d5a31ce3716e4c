"""A run's spans for OpenTelemetry: a trace for each step, sent by its own library."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import polars as pl
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from flows.looking.step_attempts import in_attempts
from tasks.errors import RequestError
from tasks.observe.ledger.timeline import FLOW, LINE, WHOLE

BATCH = 1000
"""Spans of one request."""
NS_PER_US = 1000
TRACES = "/v1/traces"
"""Where a receiver takes traces, below its address."""

logging.getLogger(OTLPSpanExporter.__module__).setLevel(
    logging.CRITICAL
)  # what it says of a failure is said here


def export(
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
    """Send spans. Those that were sent before have the same ids again.

    What a receiver wants of headers is the library's: OTEL_EXPORTER_OTLP_HEADERS, and its other variables.

    Args:
        spans: of the data set, of these steps and of those beside them.
        steps: those whose spans are sent.
        run: its random id.
        name: what people call it.
        endpoint: of a receiver that speaks OTLP over HTTP, such as http://127.0.0.1:4318.
        timeout_s: seconds for each request, with the library's own further attempts.
        known: ids of spans that it has, which are not sent; those that are sent are added.
        is_over: nothing more comes of the steps: what has no span `step` around it is given one.

    Returns:
        Spans that were sent.

    Raises:
        RequestError: it did not take them.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}{TRACES}"
    rows = in_attempts(spans, steps, is_over=is_over)
    known = set() if known is None else known
    new = [each for each in _readable(rows, run, name) if each.context.span_id not in known]
    exporter = OTLPSpanExporter(url, timeout=timeout_s)
    try:
        for at in range(0, len(new), BATCH):
            batch = new[at : at + BATCH]
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise RequestError(f"{url} did not take the spans; {at} were sent")
            known.update(each.context.span_id for each in batch)
    finally:
        exporter.shutdown()
    return len(new)


def _readable(spans: pl.DataFrame, run: str, name: str) -> Iterator[ReadableSpan]:
    """Spans as the library has them, each below the one around it; a lane's outermost ones below their attempt's."""
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
    """Ids that are the same whenever a span is sent; of a span around a whole attempt known before it ends."""
    trace = hashlib.blake2b(f"{run} {row['step']}".encode(), digest_size=16).digest()
    is_whole = (row["process"], row["lane"], row["name"]) == (FLOW, LINE, WHOLE)
    when = row["attempt"] if is_whole else row["start"]
    place = f"{row['process']} {row['lane']} {row['name']} {when}"
    span = hashlib.blake2b(trace + place.encode(), digest_size=8).digest()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int.from_bytes(trace), int.from_bytes(span), is_remote=False, trace_flags=sampled)
