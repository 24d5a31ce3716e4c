"""Export data sets as Parquet or JSON lines, one file each, for tools that read neither Arrow nor hive partitions.

One partition is in memory at a time. An export is written into a hidden folder next to the target and renamed, so that it
appears complete or not at all.
"""

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_tables import check_rollouts
from rollmill.tasks.store.filesystem import describe_os_error, open_files, publish_path
from rollmill.tasks.store.folders import PARTITION_KEYS, PartitionValue, RunFolder
from rollmill.tasks.store.reader import read

ExportForm: TypeAlias = Literal["parquet", "jsonl"]
ROW_GROUP_BYTES = 64 << 20
"""In-memory size of a Parquet row group (64 MiB)."""
JSON_MEANING = b"JSON:"
"""Prefix of the description of JSON columns."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One written file of an export: its path, number of rows and size in bytes."""

    path: Path
    rows: int
    bytes: int


def parse_form(name: str) -> ExportForm:
    """Return the export format of this name, parquet or jsonl; raise ConfigError for another name."""
    if name not in get_args(ExportForm):
        raise ConfigError("--to", name, "give parquet or jsonl")
    return cast(ExportForm, name)


def export_datasets(
    folder: RunFolder, output: Path, form: ExportForm, datasets: Sequence[str] = ()
) -> list[ExportedFile]:
    """Write data sets to `output`/DATASET.parquet or .jsonl: the named ones, or all that have rows.

    The columns of `states` depend on the environment, so each environment gets a file states-ENV. A named data set without
    rows gives a file with zero rows.

    Parquet files have the columns' types and metadata and are compressed with zstd. In JSON lines, times are ISO 8601, NaN is
    null, JSON columns are JSON values, and bytes are base64.

    Raises:
        ConfigError: a name is no data set; `output` exists, or cannot be written.
        StoreError: a shard cannot be read, or a file not be written; nothing is left behind.
    """
    for name in datasets:
        if name not in PARTITION_KEYS:
            known = ", ".join(PARTITION_KEYS)
            raise ConfigError("--dataset", name, f"unknown data set; the data sets are {known}")
    if "rollouts" in (datasets or PARTITION_KEYS):
        check_rollouts(folder)
    if output.exists():
        raise ConfigError("--output", str(output), "it exists already; give a new folder, or remove it")
    with contextlib.ExitStack() as publishing:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            staged = publishing.enter_context(publish_path(output))
            staged.mkdir()
        except OSError as error:
            raise ConfigError(
                "--output", str(output), f"cannot write there: {describe_os_error(error)}"
            ) from error
        written = [
            _export_file(folder, staged / f"{file}.{form}", form, name, partitions)
            for name in dict.fromkeys(datasets or PARTITION_KEYS)
            for file, partitions in list_partitions(folder, name).items()
        ]
        kept = [each for each in written if each.rows or datasets]
        for each in written:
            if each not in kept:
                each.path.unlink()
    return [ExportedFile(output / each.path.name, each.rows, each.bytes) for each in kept]


def list_partitions(folder: RunFolder, dataset: str) -> dict[str, list[dict[str, PartitionValue]]]:
    """Return the partitions of a data set in order, by the name of the table that can hold all of them.

    `states` has one table for each environment, `logprobs` one for each policy.

    Example: {"states-guess": [{"env": "guess", "step": 0}, {"env": "guess", "step": 1}]}
    """
    pattern = "/".join([dataset, *(f"{key}=*" for key in PARTITION_KEYS[dataset])])
    places = sorted({key.rpartition("/")[0] for key in open_files(folder).keys(f"{pattern}/*.arrow")})
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


def _export_file(
    folder: RunFolder,
    path: Path,
    form: ExportForm,
    dataset: str,
    partitions: Sequence[dict[str, PartitionValue]],
) -> ExportedFile:
    rows = 0

    def read_each() -> Iterator[pa.Table]:
        nonlocal rows
        for partition in partitions:
            table = read(folder, dataset, None, **partition)
            rows += table.num_rows
            yield table

    if form == "parquet":
        schema = read(folder, dataset, None, **(partitions[0] if partitions else {})).schema
        _write_parquet(path, schema, read_each())
    else:
        with path.open("wb") as file:
            for table in read_each():
                for batch in table.to_batches():
                    file.writelines(json_lines(batch))
    return ExportedFile(path, rows, path.stat().st_size)


def _write_parquet(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    """Write tables to one file, in row groups of about ROW_GROUP_BYTES."""
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        gathered: list[pa.Table] = []
        for table in tables:
            gathered.append(table)
            if sum(each.nbytes for each in gathered) >= ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(gathered))
                gathered = []
        if gathered:
            writer.write_table(pa.concat_tables(gathered))


def json_lines(rows: pa.RecordBatch) -> Iterator[bytes]:
    """Yield each row as one line of JSON.

    Example: a row of `batches` is {"run":"6b87","step":3,"order":0,...,"advantage":0.5,"reward":1.0,...}.
    """
    names = rows.schema.names
    columns = [_json_values(field, rows.column(field.name)) for field in rows.schema]
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        try:
            yield orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        except orjson.JSONEncodeError:
            # Half a surrogate pair in a text, which a model may write and UTF-8 lacks.
            yield b"{%b}\n" % b",".join(orjson.dumps(name) + b":" + _encode(row[name]) for name in names)


def _encode(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def _json_values(field: pa.Field, column: pa.Array) -> Sequence[object]:
    """Convert a column to values that orjson serializes; lists of numbers become numpy arrays."""
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
        return [_parse_json(text) for text in column.to_pylist()]
    values: list[object] = column.to_pylist()
    return values


def _are_numbers(lists: pa.Array) -> bool:
    """Return True if all lists hold numbers or booleans, without nulls, so that numpy can hold them."""
    flat = lists.flatten()
    return pa.types.is_primitive(flat.type) and not lists.null_count and not flat.null_count


def _parse_json(text: str) -> object:
    """Parse JSON text, in which NaN is allowed; return text that is not JSON unchanged."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except ValueError:
        return text
