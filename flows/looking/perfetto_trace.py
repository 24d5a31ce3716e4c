"""A run's spans as a trace that ui.perfetto.dev opens."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import polars as pl
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from tasks.errors import ConfigError
from tasks.observe.ledger.timeline import FLOW, LINE, timeline_of

MOST_SPANS = 500_000
"""Spans of a trace, some 60 MB: the last steps' where there are more."""
PACKED = {
    "trajectory": r"^\d+\.",
    "held-out trajectory": r"^v\d+\.",
    "group": r"^\d+(/|$)",
    "collect": r"^collect\.",
    "evaluate": r"^evaluate\.",
}
"""What lanes of the flow are of, by how they begin, which come and go: those that are not open at once share a track."""
SEQUENCE = 1
NS_PER_US = 1000


def write_trace(spans: pl.DataFrame, file: Path) -> int:
    """Write a trace: a process each of the flow, the ranks and the servers, a track each of their lanes.

    Trajectories, groups, and what is collected and evaluated, are on as many tracks as were ever open at once. A span's
    category is its step; its lane, step and cause are its arguments.

    Args:
        spans: of the data set.
        file: that is written.

    Returns:
        Spans that are in it.

    Raises:
        ConfigError: the file cannot be written.
    """
    shown = _on_tracks(timeline_of(spans.sort("started_at").tail(MOST_SPANS)).spans)
    try:
        with file.open("wb") as out:
            builder = StreamingTraceProtoBuilder(out)
            for packet in _packets(shown):
                builder.write_packet(packet)
    except OSError as error:
        raise ConfigError("--perfetto", str(file), f"the trace cannot be written: {error}") from error
    return len(shown)


def _on_tracks(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans with their track, in the order of their tracks and starts; those of a track lie inside one another or apart."""
    kind = pl.coalesce(
        pl.when(pl.col("lane").str.contains(pattern)).then(pl.lit(name)) for name, pattern in PACKED.items()
    )
    key = ["lane_id", "attempt"]  # a lane that was gone on with after a kill was not open all the while
    is_packed = (pl.col("process") == FLOW) & kind.is_not_null()
    lanes = (
        spans.filter(is_packed)
        .group_by(key)
        .agg(kind.first().alias("kind"), pl.col("start").min(), pl.col("end").max())
    )
    in_order = lanes.sort("kind", "start", "lane_id")
    places = [
        f"{name} {place:03d}"
        for (name,), extents in in_order.group_by("kind", maintain_order=True)
        for place in _places(extents.select("start", "end").rows())
    ]
    tracks = in_order.select(*key, pl.Series("track", places, pl.String))
    return (
        spans.join(tracks, on=key, how="left")
        .with_columns(pl.coalesce("track", "lane").alias("track"))
        .sort("process", "track", "start", "end", descending=[False, False, False, True])
    )


def _places(extents: list[tuple[int, int]]) -> Iterator[int]:
    """A place each for (start, end), which come by start: the first that is free, so that few are needed."""
    free_at: list[int] = []
    for start, end in extents:
        place = next((at for at, free in enumerate(free_at) if free <= start), len(free_at))
        free_at[place : place + 1] = [end]
        yield place


def _packets(spans: pl.DataFrame) -> Iterator[TracePacket]:
    processes = spans["process"].unique().sort().to_list()
    for pid, process in enumerate(sorted(processes, key=lambda each: (each != FLOW, each)), start=1):
        described = TracePacket()
        described.track_descriptor.uuid = _uuid(process)
        described.track_descriptor.process.pid = pid
        described.track_descriptor.process.process_name = process
        yield described
    for (process, track), held in spans.group_by("process", "track", maintain_order=True):
        uuid = _uuid(f"{process}\n{track}")
        described = TracePacket()
        described.track_descriptor.uuid = uuid
        described.track_descriptor.parent_uuid = _uuid(str(process))
        described.track_descriptor.name = "the step's line" if track == LINE else str(track)
        described.track_descriptor.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        yield described
        opened: list[int] = []
        for row in held.iter_rows(named=True):
            yield from _closed(uuid, opened, until=row["start"])
            begins = _event(uuid, TrackEvent.TYPE_SLICE_BEGIN, row["start"])
            begins.track_event.name = row["name"]
            begins.track_event.categories.append(f"step {row['step']}" if row["step"] >= 0 else "no step")
            for name in ("lane", "cause"):
                if row[name]:
                    begins.track_event.debug_annotations.add(name=name, string_value=row[name])
            begins.track_event.debug_annotations.add(name="step", int_value=row["step"])
            yield begins
            opened.append(min([row["end"], *opened[-1:]]))  # an outer one that was rounded ends no earlier
        yield from _closed(uuid, opened, until=None)


def _closed(uuid: int, opened: list[int], until: int | None) -> Iterator[TracePacket]:
    """The ends of the slices of a track that end by then, the innermost first; None: of all."""
    while opened and (until is None or opened[-1] <= until):
        yield _event(uuid, TrackEvent.TYPE_SLICE_END, opened.pop())


def _event(uuid: int, kind: int, time: int) -> TracePacket:
    packet = TracePacket()
    packet.timestamp = time * NS_PER_US
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_event.type = kind
    packet.track_event.track_uuid = uuid
    return packet


def _uuid(name: str) -> int:
    """A number for a track that two traces of one run agree on."""
    return zlib.crc32(name.encode()) << 16 | len(name) & 0xFFFF
