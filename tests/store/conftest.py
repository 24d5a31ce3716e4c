"""Rows of any data set, made from its schema."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from rollmill.tasks.store import schemas
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.rows import no_rows
from rollmill.tasks.store.run import writable_run
from rollmill.tasks.store.schema_versions import ADDED_COLUMNS, stored_schema
from rollmill.tasks.store.schemas import dataset_schema, make_batch

RowMaker = Callable[..., pa.RecordBatch]
Writing = Callable[..., AbstractContextManager[None]]


def make_rows(dataset: str, n: int = 1, **columns: object) -> pa.RecordBatch:
    """`n` rows with a plain value in every column but those given, each one value for all rows or a list."""
    # Each row is one segment.
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in ADDED_COLUMNS.get(dataset, {}).items()
    }
    made = {
        field.name: columns.get(field.name, plain.get(field.name, _plain(field.type)))
        for field in dataset_schema(dataset)
    }
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


@pytest.fixture
def version_2(monkeypatch: pytest.MonkeyPatch) -> Writing:
    """A context in which rows are made and written as version 2, or another, did: without the columns that came after it."""

    @contextmanager
    def writing(version: int = 2) -> Iterator[None]:
        marked = {
            name: schema.with_metadata({**schema.metadata, b"schema_version": str(version).encode()})
            for name, schema in schemas.SCHEMAS.items()
        }
        old = {
            name: stored_schema(name, each).with_metadata(each.metadata)
            for name, each in marked.items()
            if name != "states"
        }
        with monkeypatch.context() as patch:
            patch.setattr(schemas, "SCHEMAS", old)
            patch.setattr(schemas, "SCHEMA_VERSION", version)
            patch.setattr(writable_run, "SCHEMA_VERSION", version)
            _forget()
            yield
        _forget()

    return writing


def _forget() -> None:
    for each in (schemas._kinds, schemas._struct, no_rows):
        each.cache_clear()
