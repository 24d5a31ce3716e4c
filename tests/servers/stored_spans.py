"""Spans made by hand, in a run's data set."""

from functools import partial

import pyarrow as pa
from span_rows import Row, spans_of

from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.names import ShardName
from tasks.store.schemas import schema_of
from tasks.store.shard import write_shard


def store_spans(folder: RunFolder, run: str, *rows: Row) -> None:
    """Give a run spans, one shard more for each step."""
    for step in sorted({row[0] for row in rows}):
        table = spans_of(*(row for row in rows if row[0] == step)).to_dicts()
        made = pa.RecordBatch.from_pylist([{"run": run} | row for row in table], schema=schema_of("spans"))
        number = len(files_of(folder).keys(f"spans/step={step:06d}/*"))
        write = partial(write_shard, name=ShardName(1, number), dataset="spans", appended=[made])
        files_of(folder).publish(f"spans/step={step:06d}", write)
