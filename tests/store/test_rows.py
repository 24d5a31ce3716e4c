"""Rows in memory: what is chosen of them, and what is put together."""

import pyarrow as pa
import pytest

from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    last_rows_by,
    no_rows,
    rows_where,
    rows_where_in,
    rows_without,
    sort_rows,
)
from rollmill.tasks.store.schemas import dataset_schema


def attempts(*rows: tuple[int, int]) -> Rows:
    """Rows of a (sample, attempt) each."""
    columns = dict(zip(("sample", "attempt"), zip(*rows, strict=True), strict=True))
    return pa.RecordBatch.from_pydict({name: list(column) for name, column in columns.items()})


THREE = attempts((0, 0), (1, 0), (0, 1))


def test_rows_are_chosen_by_value() -> None:
    assert column_values(rows_where(THREE, "sample", 0), "attempt") == [0, 1]
    assert column_values(rows_where_in(THREE, "sample", [1, 2]), "attempt") == [0]
    assert column_values(rows_without(THREE, "sample", [1]), "attempt") == [0, 1]


def test_rows_in_order_are_not_copied_and_others_are_put_so() -> None:
    assert column_values(sort_rows(THREE, "sample"), "sample") == [0, 0, 1]
    assert sort_rows(THREE, "attempt") is THREE
    assert not sort_rows(THREE.slice(0, 0), "sample").num_rows


def test_nothing_that_is_chosen_has_the_columns_all_the_same() -> None:
    for nothing in (
        rows_where(THREE, "sample", 2),
        rows_where_in(THREE, "sample", []),
        rows_without(THREE, "sample", [0, 1]),
    ):
        assert nothing.num_rows == 0
        assert nothing.schema.equals(THREE.schema)


def test_the_last_attempt_of_each_sample_is_kept() -> None:
    assert last_rows_by(THREE, ["sample"], "attempt").to_pylist() == attempts((0, 1), (1, 0)).to_pylist()


@pytest.mark.parametrize("n", [0, 1])
def test_of_few_rows_all_are_last(n: int) -> None:
    assert last_rows_by(THREE.slice(0, n), ["sample"], "attempt").equals(THREE.slice(0, n))


def test_rows_are_joined_in_order_also_without_any() -> None:
    nothing = THREE.slice(0, 0)
    assert concat_rows(nothing, THREE.slice(0, 1), nothing, THREE.slice(1)).equals(THREE)
    assert concat_rows(nothing, THREE, nothing).equals(THREE)
    assert concat_rows(no_rows("scores"), no_rows("scores")).schema.equals(dataset_schema("scores"))
