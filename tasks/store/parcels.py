"""Rows as bytes, for another process."""

import pyarrow as pa

from tasks.store.rows import Rows, rows_of


def packed(rows: Rows) -> bytes:
    """Rows with their schema, as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())


def unpacked(content: bytes) -> Rows:
    """The inverse of `packed`; the columns lie in `content`, nothing is copied."""
    return rows_of(pa.ipc.open_stream(content).read_all())
