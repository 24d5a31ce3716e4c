"""Data sets as Parquet or JSON lines, a file each, for tools that read neither Arrow nor hive partitions.

One partition is in memory at a time. An export appears whole or not at all: it is written into a hidden folder beside
the one that is asked for, and renamed.
"""

import base64
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import ConfigError, StoreError
from tasks.store.filesystem import files_of, reason_of
from tasks.store.layout import PARTITION_KEYS, PartitionValue, RunFolder
from tasks.store.reader import read

Form: TypeAlias = Literal["parquet", "jsonl"]
ROW_GROUP_BYTES = 64 << 20
"""Rows are gathered up to this (64 MiB, as they are in memory) into a row group of Parquet."""
JSON_MEANING = b"JSON:"
"""How the meaning of a column begins whose text is JSON."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One file of an export."""

    path: Path
    rows: int
    bytes: int


def form_of(name: str) -> Form:
    """A format by its name; ConfigError when there is none."""
    if name == "parquet":
        return "parquet"
    if name == "jsonl":
        return "jsonl"
    raise ConfigError("--to", name, "give parquet or jsonl")


def export(folder: RunFolder, output: Path, form: Form, datasets: Sequence[str] = ()) -> list[Exported]:
    """Write data sets into `output`/DATASET.parquet or .jsonl: those that are named, or all that have rows.

    Of `states`, whose columns depend on the environment, each environment has a file, states-ENV. One that is named and
    has no rows is a file of zero rows.

    Parquet has the columns' types and metadata, and is compressed with zstd. In JSON lines, a row each, times are
    ISO 8601, NaN is null, columns of JSON text are JSON values, and bytes are base64.

    Raises:
        ConfigError: no data set has one of these names; `output` is there already, or cannot be written.
        StoreError: a shard cannot be read, or a file not be written; nothing is left then.
    """
    for name in datasets:
        if name not in PARTITION_KEYS:
            known = ", ".join(PARTITION_KEYS)
            raise ConfigError("--dataset", name, f"no data set is called that; there are {known}")
    if output.exists():
        raise ConfigError("--output", str(output), "it is there already; name a new folder, or remove it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    except OSError as error:
        raise ConfigError("--output", str(output), f"cannot write there: {reason_of(error)}") from error
    try:
        written = [
            _export_one(folder, unfinished / f"{file}.{form}", form, name, partitions)
            for name in dict.fromkeys(datasets or PARTITION_KEYS)
            for file, partitions in _tables(folder, name).items()
        ]
        kept = [each for each in written if each.rows or datasets]
        for each in written:
            if each not in kept:
                each.path.unlink()
        unfinished.chmod(0o755)
        unfinished.rename(output)
    except OSError as error:
        raise StoreError(f"cannot write {output}: {reason_of(error)}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return [Exported(output / each.path.name, each.rows, each.bytes) for each in kept]


def _tables(folder: RunFolder, dataset: str) -> dict[str, list[dict[str, PartitionValue]]]:
    """The files to make of a data set, by name: the partitions of each, in order.

    `states` has one an environment, `logprobs` one a policy.

    Example: {"states-guess": [{"env": "guess", "step": 0}, {"env": "guess", "step": 1}]}
    """
    pattern = "/".join([dataset, *(f"{key}=*" for key in PARTITION_KEYS[dataset])])
    places = sorted({key.rpartition("/")[0] for key in files_of(folder).keys(f"{pattern}/*.arrow")})
    found: dict[str, list[dict[str, PartitionValue]]] = {}
    for place in places:
        partition = {
            key: int(value) if key in ("step", "version", "epoch") else unquote(value)
            for key, value in (part.split("=", 1) for part in place.split("/")[1:])
        }
        outer = place.split("/")[1].partition("=")[2]
        name = f"{dataset}-{outer}" if dataset in ("states", "logprobs") else dataset
        found.setdefault(name, []).append(partition)
    return found or {dataset: []}


def _export_one(
    folder: RunFolder, path: Path, form: Form, dataset: str, partitions: Sequence[dict[str, PartitionValue]]
) -> Exported:
    rows = 0
    schema = read(folder, dataset, None, **(partitions[0] if partitions else {})).schema
    with _SINKS[form](path, schema) as sink:
        for partition in partitions:
            table = read(folder, dataset, None, **partition)
            sink.write(table)
            rows += table.num_rows
    return Exported(path, rows, path.stat().st_size)


class _Sink(AbstractContextManager["_Sink"], Protocol):
    def write(self, table: pa.Table) -> None: ...


class _ParquetSink:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._gathered: list[pa.Table] = []

    def __enter__(self) -> Self:
        return self

    def write(self, table: pa.Table) -> None:
        self._gathered.append(table)
        if sum(each.nbytes for each in self._gathered) >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            self._writer.write_table(pa.concat_tables(self._gathered))
            self._gathered = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
        finally:
            self._writer.close()


class _JsonSink:
    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            self._file.writelines(json_lines(batch))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


_SINKS: dict[Form, Callable[[Path, pa.Schema], _Sink]] = {"parquet": _ParquetSink, "jsonl": _JsonSink}


def json_lines(rows: pa.RecordBatch) -> Iterator[bytes]:
    """Each row as one line of JSON.

    Example: a row of `batches` is {"run":"6b87","step":3,"order":0,...,"advantage":0.5,"reward":1.0,...}.
    """
    names = rows.schema.names
    columns = [_json_values(field, rows.column(field.name)) for field in rows.schema]
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _json_values(field: pa.Field, column: pa.Array) -> Sequence[object]:
    """A column as values that orjson writes as JSON; lists as arrays, without an object for each element."""
    if pa.types.is_large_list(field.type) and _are_numbers(column):
        flat = column.flatten().to_numpy(zero_copy_only=False)
        ends = column.value_lengths().to_numpy().cumsum()
        return [
            flat[end - length : end]
            for end, length in zip(ends, column.value_lengths().to_pylist(), strict=True)
        ]
    if pa.types.is_large_binary(field.type) or pa.types.is_binary(field.type):
        return [base64.b64encode(value).decode() for value in column.to_pylist()]
    if (field.metadata or {}).get(b"meaning", b"").startswith(JSON_MEANING):
        return [_parsed(text) for text in column.to_pylist()]
    values: list[object] = column.to_pylist()
    return values


def _are_numbers(lists: pa.Array) -> bool:
    """True for lists that numpy can hold: of numbers or truth values, without nulls."""
    flat = lists.flatten()
    return pa.types.is_primitive(flat.type) and not lists.null_count and not flat.null_count


def _parsed(text: str) -> object:
    """The value of JSON text, in which Python writes NaN; text that is no JSON stays text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text
