"""Rows of problems from files and data sets: only the columns that are needed, and errors that name file, row and column."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl
from polars.datatypes import DataTypeClass

from tasks.errors import ConfigError
from tasks.rollout.config import PromptsConfig

JSONL_SUFFIXES = (".jsonl", ".ndjson")
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")


def read_rows(config: PromptsConfig, path: str, split: str, columns: Sequence[str]) -> pl.DataFrame:
    """Columns of all rows of a file or data set.

    Args:
        config: settings, for the format.
        path: where the rows are.
        split: which one of a Hugging Face data set.
        columns: their names.

    Raises:
        ConfigError: it cannot be read, or lacks a column.
    """
    return READERS[format_of(config, path)](config, path, split, list(dict.fromkeys(columns)))


def with_json_values(config: PromptsConfig, path: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The same rows, dates, times and durations in `columns` as ISO text and decimals as text.

    Raises:
        ConfigError: a column holds what is no JSON value, bytes for example.
    """
    checked = [*config.columns, *filter(None, (config.answer_column,))]
    for name in dict.fromkeys(checked):
        kind = frame.schema[name]
        if kind.is_temporal():
            frame = frame.with_columns(pl.col(name).dt.to_string("iso"))
        elif kind.is_decimal():
            frame = frame.with_columns(pl.col(name).cast(pl.String))
        elif not _is_json(kind):
            remedy = (
                f"the column {name!r} is of type {kind}, which is no JSON value: store it as text or numbers"
            )
            raise wrong(config, path, remedy)
    return frame


def _is_json(kind: pl.DataType) -> bool:
    """True for columns of JSON values, and of lists and objects of them."""
    if isinstance(kind, pl.Struct):
        return all(_is_json(_instance(field.dtype)) for field in kind.fields)
    if isinstance(kind, pl.List | pl.Array):
        return _is_json(_instance(kind.inner))
    is_number = kind.is_numeric() and not kind.is_decimal()
    return is_number or isinstance(kind, pl.String | pl.Boolean | pl.Null | pl.Categorical | pl.Enum)


def _instance(kind: pl.DataType | DataTypeClass) -> pl.DataType:
    return kind if isinstance(kind, pl.DataType) else kind()


def wrong(config: PromptsConfig, path: str, remedy: str) -> ConfigError:
    """What is wrong with a file, under the setting that names it."""
    name = "held_out_path" if path == config.held_out_path else "path"
    return ConfigError(f"rollout.prompts.{name}", path, remedy)


def format_of(config: PromptsConfig, path: str) -> str:
    """Jsonl, parquet or huggingface."""
    place = Path(path)
    if config.format:
        return config.format
    if place.suffix in JSONL_SUFFIXES:
        return "jsonl"
    if any((place / name).is_file() for name in SAVED_DATASET):
        return "huggingface"
    if place.suffix == ".parquet" or place.is_dir():
        return "parquet"
    remedy = (
        "give a .jsonl or .parquet file, a folder of .parquet files, a folder saved by `datasets`, or the "
        "name of a Hugging Face data set with rollout.prompts.format=huggingface"
    )
    raise wrong(config, path, remedy)


def _jsonl(config: PromptsConfig, path: str, split: str, columns: list[str]) -> pl.DataFrame:
    """Every value as text: numbers and lists as JSON has them."""
    _check_exists(config, path)
    try:
        frame = pl.scan_ndjson(path, schema=dict.fromkeys(columns, pl.String)).collect()
    except pl.exceptions.PolarsError as error:
        raise wrong(config, path, _first_bad_line(path) or str(error)) from error
    if missing := [name for name in columns if len(frame) and frame[name].null_count() == len(frame)]:
        raise wrong(config, path, f"no line has {' or '.join(map(repr, missing))}")
    return frame


def _first_bad_line(path: str) -> str:
    """What is wrong with the first line that is not a JSON object."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object"
            except ValueError as error:
                return f"line {number} is not JSON: {error}"
    return ""


def _parquet(config: PromptsConfig, path: str, split: str, columns: list[str]) -> pl.DataFrame:
    _check_exists(config, path)
    files = sorted(Path(path).glob("**/*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise wrong(config, path, "there is no .parquet file in this folder")
    try:
        scan = pl.scan_parquet(files)
        _check_columns(config, path, columns, scan.collect_schema().names())
        return scan.select(columns).collect()
    except pl.exceptions.PolarsError as error:
        raise wrong(config, path, f"cannot be read as Parquet: {error}") from error


def _hugging_face(config: PromptsConfig, path: str, split: str, columns: list[str]) -> pl.DataFrame:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        remedy = (
            "install the library `datasets` to read Hugging Face data sets, or give a .jsonl or .parquet file"
        )
        raise wrong(config, path, remedy) from error
    try:
        if Path(path).is_dir():
            loaded = datasets.load_from_disk(path)
            data = loaded[split] if isinstance(loaded, Mapping) else loaded
        else:
            data = datasets.load_dataset(path, config.subset or None, split=split)
    except Exception as error:  # the library raises whatever its readers and the network do
        remedy = (
            f"split {split!r} of this Hugging Face data set cannot be read ({type(error).__name__}: {error})"
        )
        raise wrong(config, path, remedy) from error
    _check_columns(config, path, columns, data.column_names)
    frame: pl.DataFrame = data.select_columns(columns).to_polars()
    return frame


READERS: Mapping[str, Callable[[PromptsConfig, str, str, list[str]], pl.DataFrame]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "huggingface": _hugging_face,
}


def _check_exists(config: PromptsConfig, path: str) -> None:
    if not Path(path).exists():
        raise wrong(config, path, f"there is no such file: {Path(path).absolute()}")


def _check_columns(config: PromptsConfig, path: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in there]:
        remedy = f"it has no column {' or '.join(map(repr, missing))}; it has {', '.join(there)}"
        raise wrong(config, path, remedy)
