"""Rows of a data set in memory, so that other stages need not know Arrow."""

from collections.abc import Collection, Sequence
from functools import cache
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tasks.store.schemas import schema_of

Rows: TypeAlias = pa.RecordBatch


@cache
def no_rows(dataset: str) -> Rows:
    """Zero rows of a data set."""
    return pa.RecordBatch.from_pylist([], schema=schema_of(dataset))


def rows_of(table: pa.Table) -> Rows:
    """A table's rows in one piece."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def joined(first: Rows, *others: Rows) -> Rows:
    """Rows of the same data set, one after another; not copied where all are in one piece."""
    there = [each for each in (first, *others) if each.num_rows] or [first]
    return pa.concat_batches(there) if len(there) > 1 else there[0]


def where(rows: Rows, column: str, value: object) -> Rows:
    """The rows with this value in a column."""
    return _filtered(rows, pc.equal(rows.column(column), pa.scalar(value)))


def where_in(rows: Rows, column: str, values: Collection[object]) -> Rows:
    """The rows with one of these values in a column."""
    return _filtered(rows, _is_in(rows, column, values))


def without(rows: Rows, column: str, values: Collection[object]) -> Rows:
    """The rows with none of these values in a column."""
    return _filtered(rows, pc.invert(_is_in(rows, column, values)))


def in_order(rows: Rows, column: str) -> Rows:
    """The rows by a column, ascending; not copied where they are so already."""
    order = pc.sort_indices(rows.column(column))
    return rows if order.equals(pa.array(range(rows.num_rows), order.type)) else rows.take(order)


def last_by(rows: Rows, keys: Sequence[str], column: str) -> Rows:
    """Of the rows that agree in `keys` the one with the largest value in `column`; sorted by `keys`.

    Example: keys ["sample"] and column "attempt" keep each sample's last attempt.
    """
    if rows.num_rows < 2:
        return rows
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in (*keys, column)])
    rows = rows.take(order)
    of_rows = list(zip(*(values(rows, key) for key in keys), strict=True))
    is_last = [own != following for own, following in zip(of_rows, [*of_rows[1:], None], strict=False)]
    return rows.filter(pa.array(is_last, pa.bool_()))


def _filtered(rows: Rows, mask: pa.BooleanArray) -> Rows:
    """The rows where the mask is True; not copied where it is so everywhere or nowhere."""
    n = mask.true_count
    if n == len(mask):
        return rows
    return rows.filter(mask) if n else rows.slice(0, 0)


def _is_in(rows: Rows, column: str, values: Collection[object]) -> pa.Array:
    kind = rows.schema.field(column).type
    return pc.is_in(rows.column(column), pa.array(list(values), kind))


def values(rows: Rows, column: str) -> Sequence[object]:
    """A column as Python values."""
    return list(rows.column(column).to_pylist())
