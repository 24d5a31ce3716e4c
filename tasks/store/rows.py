"""Rows of a data set in memory and as bytes for another process, so that other stages need not know Arrow."""

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import islice
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.store.schemas import dataset_schema

Rows: TypeAlias = pa.RecordBatch
# Most items that an error or a finding names; it always gives their number.
MAX_NAMED = 5


@cache
def no_rows(dataset: str) -> Rows:
    """Return a record batch with zero rows and the schema of a data set."""
    return pa.RecordBatch.from_pylist([], schema=dataset_schema(dataset))


def rows_from_table(table: pa.Table) -> Rows:
    """Return the rows of a table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def concat_rows(first: Rows, *others: Rows) -> Rows:
    """Concatenate rows of one data set; nothing is copied if all but one are empty."""
    there = [each for each in (first, *others) if each.num_rows] or [first]
    return pa.concat_batches(there) if len(there) > 1 else there[0]


def rows_where(rows: Rows, column: str, value: object) -> Rows:
    """Select the rows that have `value` in a column."""
    if not rows.num_rows:
        return rows
    return _filter_rows(rows, pc.equal(rows.column(column), pa.scalar(value)))


def rows_where_in(rows: Rows, column: str, values: Collection[object]) -> Rows:
    """Select the rows that have one of `values` in a column."""
    if not rows.num_rows:
        return rows
    return _filter_rows(rows, _is_in(rows, column, values))


def rows_without(rows: Rows, column: str, values: Collection[object]) -> Rows:
    """Select the rows that have none of `values` in a column."""
    if not rows.num_rows:
        return rows
    return _filter_rows(rows, pc.invert(_is_in(rows, column, values)))


def sort_rows(rows: Rows, column: str) -> Rows:
    """Sort rows by a column, ascending; they are not copied if they are sorted already."""
    order = pc.sort_indices(rows.column(column))
    return rows if order.equals(pa.array(range(rows.num_rows), order.type)) else rows.take(order)


def last_rows_by(rows: Rows, keys: Sequence[str], column: str) -> Rows:
    """Select, for each combination of `keys`, the row with the largest value in `column`; sorted by `keys`.

    Example: keys ["sample"] and column "attempt" keep each sample's last attempt.
    """
    if rows.num_rows < 2:
        return rows
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in (*keys, column)])
    rows = rows.take(order)
    of_rows = list(zip(*(column_values(rows, key) for key in keys), strict=True))
    is_last = [own != following for own, following in zip(of_rows, [*of_rows[1:], None], strict=False)]
    return rows.filter(pa.array(is_last, pa.bool_()))


def _filter_rows(rows: Rows, mask: pa.BooleanArray) -> Rows:
    """Select the rows where the mask is True; nothing is copied if all or none are."""
    n = mask.true_count
    if n == len(mask):
        return rows
    return rows.filter(mask) if n else rows.slice(0, 0)


def _is_in(rows: Rows, column: str, values: Collection[object]) -> pa.Array:
    kind = rows.schema.field(column).type
    return pc.is_in(rows.column(column), pa.array(list(values), kind))


def column_values(rows: Rows, column: str) -> Sequence[object]:
    """Return a column as Python values."""
    return list(rows.column(column).to_pylist())


def arrow_bytes() -> int:
    """Return the number of bytes that Arrow's default memory pool has allocated in this process."""
    allocated: int = pa.default_memory_pool().bytes_allocated()
    return allocated


def release_arrow() -> None:
    """Release unused memory of Arrow's default memory pool to the operating system."""
    pa.default_memory_pool().release_unused()


def name_first(things: Iterable[object]) -> str:
    """Join the first few items to a text that ends with the number of the others.

    Example: "a, b, c, d, e and 7 more".
    """
    rest = iter(things)
    named = ", ".join(str(each) for each in islice(rest, MAX_NAMED))
    n_more = sum(1 for _ in rest)
    return f"{named} and {n_more} more" if n_more else named
