"""Rows of any data set, made from its schema."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.schemas import dataset_schema, make_batch

RowMaker = Callable[..., pa.RecordBatch]


def make_rows(dataset: str, n: int = 1, **columns: object) -> pa.RecordBatch:
    """`n` rows with a plain value in every column but those given, each one value for all rows or a list."""
    made = {field.name: columns.get(field.name, _plain(field.type)) for field in dataset_schema(dataset)}
    return make_batch(
        dataset,
        {name: value if _is_column(name, value, columns) else [value] * n for name, value in made.items()},
    )


def _is_column(name: str, value: object, columns: dict[str, object]) -> bool:
    return name in columns and isinstance(value, list)


def _plain(kind: pa.DataType) -> object:
    if pa.types.is_large_list(kind):
        return [_plain(kind.value_type)] * 3
    if pa.types.is_timestamp(kind):
        return datetime(2026, 11, 1, tzinfo=UTC)
    if pa.types.is_large_binary(kind):
        return b"\x00\xff"
    return pa.scalar(1).cast(kind).as_py()


@pytest.fixture(scope="session")
def rows() -> RowMaker:
    return make_rows


# A test makes dozens of requests on S3, which last seconds. tests/store/test_s3.py and test_lease.py are the quick tests of S3.
@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place for runs: on a disk, and on S3."""
    if request.param == "local":
        return str(tmp_path)
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    return str(request.getfixturevalue("s3_root"))


@pytest.fixture
def folder(root: str) -> RunFolder:
    """A run's folder as it is when it is open for writing."""
    run = RunFolder(f"{root}/run")
    run.tmp.mkdir(parents=True)
    return run
