"""Spans made by hand, in a run's data set."""

from functools import partial

import pyarrow as pa
from span_rows import Row, spans_of

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.schemas import dataset_schema
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName


def store_spans(folder: RunFolder, run: str, *rows: Row) -> None:
    """Give a run spans, one shard more for each step."""
    for step in sorted({row[0] for row in rows}):
        table = spans_of(*(row for row in rows if row[0] == step)).to_dicts()
        made = pa.RecordBatch.from_pylist(
            [{"run": run} | row for row in table], schema=dataset_schema("spans")
        )
        number = len(open_files(folder).keys(f"spans/step={step:06d}/*"))
        write = partial(write_shard, name=ShardName(1, number), dataset="spans", appended=[made])
        open_files(folder).publish(f"spans/step={step:06d}", write)
