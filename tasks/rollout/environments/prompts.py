"""The environment `prompts`: problems from a file or a data set, each answered in one turn."""

import importlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import polars as pl
from polars.datatypes import DataTypeClass

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import PromptsConfig, RolloutConfig
from rollmill.tasks.rollout.environment import Episode, Example, Message, SingleTurn, Split

CRC_RANGE = 1 << 32

TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
MESSAGE_FIELDS = {"role", "content"}


class Prompts:
    """Environment with the problems of the file or data set in `rollout.prompts`, one turn each.

    The content of an example has the problem, the answer and the columns that `rollout.prompts.columns` names.
    """

    name = "prompts"
    tools = ()
    stop = ()

    def __init__(self, config: PromptsConfig) -> None:
        self._config, self._splits = config, read_problems(config)

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Read the problems; ConfigError names the file, row and column of the first error."""
        return cls(config.prompts)

    def size(self, split: Split) -> int:
        return len(self._splits[split].rows)

    async def example(self, split: Split, index: int) -> Example:
        config, problems = self._config, self._splits[split]
        row = int(problems.rows[index])
        values = problems.frame.row(row, named=True)
        content = {"problem": values[config.prompt_column]}
        if config.answer_column:
            content["answer"] = str(values[config.answer_column])
        content |= {name: values[name] for name in config.columns}
        return Example(f"{problems.source}:{row}", content)

    def episode(self, example: Example, seed: int) -> Episode:
        asked = messages_from_problem(example.content["problem"])
        system = (Message("system", self._config.system),) if self._config.system else ()
        return SingleTurn((*system, *asked))


def messages_from_problem(problem: object) -> tuple[Message, ...]:
    """Return the opening messages of a problem: a text is the user's message; a list of messages, or its JSON, is the opening.

    Raises:
        msgspec.ValidationError: the list is empty, or holds something else than messages with known roles.
    """
    listed = _parse_message_list(problem) if isinstance(problem, str) else problem
    if listed is None:
        return (Message("user", str(problem)),)
    if isinstance(listed, list):
        # Typed columns have nulls where only other rows set the field.
        listed = [
            {name: value for name, value in each.items() if value is not None}
            if isinstance(each, dict)
            else each
            for each in listed
        ]
    messages = msgspec.convert(listed, tuple[Message, ...])
    if not messages:
        raise msgspec.ValidationError("Expected at least one message")
    return messages


def _parse_message_list(text: str) -> list[object] | None:
    """Parse a text that is a list of messages as JSON; None for any other text."""
    if not text.startswith("[{"):
        return None
    try:
        listed = msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, UnicodeError):
        # Text that only begins like a list.
        return None
    return listed if all(isinstance(each, dict) and "role" in each for each in listed) else None


@dataclass(frozen=True, slots=True)
class Problems:
    """The rows of a split in a file of problems.

    Attributes:
        frame: the needed columns of the whole file.
        rows: [n] the split's rows in `frame`, counted from 0.
        source: the file or data set.
    """

    frame: pl.DataFrame
    rows: np.ndarray
    source: str


# A file may have a million rows, and the environment may be created more than once in a process.
@lru_cache(maxsize=2)
def read_problems(config: PromptsConfig) -> Mapping[Split, Problems]:
    """Read the problems of both splits, once per process.

    Raises:
        ConfigError: a file, a column or a value is missing.
    """
    if not config.path:
        raise ConfigError("rollout.prompts.path", "", "give the file or data set with the problems")
    frame = _read_prompts(config, config.path, config.train_split)
    if held_out_path := _find_held_out_path(config):
        held_out = _read_prompts(config, held_out_path, config.held_out_split or config.train_split)
        is_train = _split_by_column(config, frame)[0] if config.split_column else np.ones(len(frame), bool)
        return {
            "train": Problems(frame, np.flatnonzero(is_train), config.path),
            "held_out": Problems(held_out, np.arange(len(held_out)), held_out_path),
        }
    if config.split_column:
        is_train, is_held_out = _split_by_column(config, frame)
    else:
        # By the problem's text and not by its row, so that equal problems are in one split.
        problems = frame[config.prompt_column].to_list()
        crcs = (zlib.crc32(_text_of(problem).encode()) for problem in problems)
        is_held_out = np.fromiter(crcs, np.int64, len(frame)) < config.held_out_share * CRC_RANGE
        is_train = ~is_held_out
    return {
        "train": Problems(frame, np.flatnonzero(is_train), config.path),
        "held_out": Problems(frame, np.flatnonzero(is_held_out), config.path),
    }


def _text_of(problem: object) -> str:
    return problem if isinstance(problem, str) else json.dumps(problem, default=str)


def _find_held_out_path(config: PromptsConfig) -> str:
    """Return the path of the held-out problems, or "" if they are part of the training file."""
    if config.held_out_path or config.split_column or not config.held_out_split:
        return config.held_out_path
    if detect_format(config, config.path) == "huggingface":
        return config.path
    remedy = "give the column that names the split of a row (rollout.prompts.split_column), or omit this"
    raise ConfigError("rollout.prompts.held_out_split", config.held_out_split, remedy)


def _read_prompts(config: PromptsConfig, path: str, split: str) -> pl.DataFrame:
    for name, column in (("problem", config.prompt_column), ("answer", config.answer_column)):
        if column and name in config.columns and name != column:
            remedy = f"the column {name!r} would replace the {name}, which is read from {column!r}; rename it"
            raise ConfigError("rollout.prompts.columns", list(config.columns), remedy)
    named = [config.prompt_column, config.answer_column, config.split_column, *config.columns]
    frame = read_rows(config, path, split, [name for name in named if name])
    for name in filter(None, (config.prompt_column, config.answer_column)):
        if len(missing := np.flatnonzero(frame[name].is_null().to_numpy())):
            remedy = f"row {missing[0]} (counted from 0) has no {name!r}; {len(missing)} of {len(frame)} rows have none"
            raise prompts_error(config, path, remedy)
    _check_prompts(config, path, frame[config.prompt_column])
    frame = convert_to_json_values(config, path, frame)
    return _extract_answers(config, path, frame) if config.answer_pattern and config.answer_column else frame


def _check_prompts(config: PromptsConfig, path: str, prompts: pl.Series) -> None:
    """Raise ConfigError if the column holds neither texts nor messages, or a row's messages are invalid."""
    kind = prompts.dtype
    if isinstance(kind, TEXT_TYPES):
        rows = prompts.cast(pl.String).str.starts_with("[{").arg_true()
    elif (
        isinstance(kind, pl.List | pl.Array)
        and isinstance(kind.inner, pl.Struct)
        and {field.name for field in kind.inner.fields} >= MESSAGE_FIELDS
    ):
        rows = pl.arange(len(prompts), eager=True)
    else:
        remedy = f"the column {prompts.name!r} is of type {kind}: expected a text, or a list of messages {{role, content}}"
        raise prompts_error(config, path, remedy)
    for row in rows:
        try:
            messages_from_problem(prompts[row] if isinstance(kind, TEXT_TYPES) else prompts[row].to_list())
        except msgspec.ValidationError as error:
            remedy = f"row {row} (counted from 0) has no messages in {prompts.name!r}: {error}"
            raise prompts_error(config, path, remedy) from error


def _extract_answers(config: PromptsConfig, path: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Replace each answer by the first group of what the regular expression `answer_pattern` matches in it.

    Raises:
        ConfigError: the pattern is invalid, or does not match an answer.
    """
    field, column = "rollout.prompts.answer_pattern", config.answer_column
    try:
        pattern = re.compile(config.answer_pattern)
    except re.error as error:
        raise ConfigError(field, config.answer_pattern, f"not a regular expression: {error}") from error
    if not pattern.groups:
        raise ConfigError(field, config.answer_pattern, "it needs a group (...) around the answer")
    found = [pattern.search(str(value)) for value in frame[column]]
    for row, match in enumerate(found):
        if match is None or match[1] is None:
            remedy = f"nothing in the {column!r} of row {row} of {path} (counted from 0) matches"
            raise ConfigError(field, config.answer_pattern, remedy)
    return frame.with_columns(pl.Series(column, [match[1].strip() for match in found if match]))


def _split_by_column(config: PromptsConfig, frame: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return [rows] bool of the training split and of the held-out split, from the column that names the split."""
    split = frame[config.split_column].cast(pl.String)
    is_train = (split == config.train_split).fill_null(value=False).to_numpy()
    held_out = (
        ~is_train if not config.held_out_split else (split == config.held_out_split).fill_null(value=False)
    )
    if not is_train.any():
        there = ", ".join(map(repr, split.unique().sort().to_list()[:5]))
        remedy = f"the column {config.split_column!r} of {config.path} contains {there}, and so on"
        raise ConfigError("rollout.prompts.train_split", config.train_split, remedy)
    return is_train, np.asarray(held_out)


JSONL_SUFFIXES = (".jsonl", ".ndjson")
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json")


def read_rows(config: PromptsConfig, path: str, split: str, columns: Sequence[str]) -> pl.DataFrame:
    """Read the given columns of all rows of a file or data set; `split` is that of a Hugging Face data set.

    Raises:
        ConfigError: the rows cannot be read, or a column is missing.
    """
    columns = list(dict.fromkeys(columns))
    form = detect_format(config, path)
    if form == "huggingface":
        return _read_hugging_face(config, path, split, columns)
    if not Path(path).exists():
        raise prompts_error(config, path, f"there is no such file: {Path(path).absolute()}")
    return _read_jsonl(config, path, columns) if form == "jsonl" else _read_parquet(config, path, columns)


def convert_to_json_values(config: PromptsConfig, path: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Convert dates, times and durations to ISO text, and decimals to text.

    Raises:
        ConfigError: a column holds values that JSON lacks, such as bytes.
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
            raise prompts_error(config, path, remedy)
    return frame


def _is_json(kind: pl.DataType) -> bool:
    """Return True if a column type holds only values that JSON has, lists and objects included."""
    if isinstance(kind, pl.Struct):
        return all(_is_json(_instance(field.dtype)) for field in kind.fields)
    if isinstance(kind, pl.List | pl.Array):
        return _is_json(_instance(kind.inner))
    is_number = kind.is_numeric() and not kind.is_decimal()
    return is_number or isinstance(kind, pl.String | pl.Boolean | pl.Null | pl.Categorical | pl.Enum)


def _instance(kind: pl.DataType | DataTypeClass) -> pl.DataType:
    return kind if isinstance(kind, pl.DataType) else kind()


def prompts_error(config: PromptsConfig, path: str, remedy: str) -> ConfigError:
    """Create a ConfigError about a file, under the setting that names the file."""
    name = "held_out_path" if path == config.held_out_path else "path"
    return ConfigError(f"rollout.prompts.{name}", path, remedy)


def detect_format(config: PromptsConfig, path: str) -> str:
    """Return the format of a path: jsonl, parquet or huggingface.

    Raises:
        ConfigError: it cannot be detected.
    """
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
    raise prompts_error(config, path, remedy)


def _read_jsonl(config: PromptsConfig, path: str, columns: list[str]) -> pl.DataFrame:
    """Read columns of a JSONL file as text; numbers, lists and objects become their JSON text.

    Raises:
        ConfigError: a line is not a JSON object, or no line has one of the columns.
    """
    try:
        # Every column is text: a type inferred from the first rows would fail at a later row of another type.
        frame = pl.scan_ndjson(path, schema=dict.fromkeys(columns, pl.String)).collect()
    except pl.exceptions.PolarsError as error:
        raise prompts_error(config, path, _first_bad_line(path) or str(error)) from error
    if missing := [name for name in columns if len(frame) and frame[name].null_count() == len(frame)]:
        raise prompts_error(config, path, f"no line has {' or '.join(map(repr, missing))}")
    return frame


def _first_bad_line(path: str) -> str:
    """Describe the first line that is not a JSON object; "" if there is none. Polars' error names no line."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number} is not a JSON object"
            except ValueError as error:
                return f"line {number} is not JSON: {error}"
    return ""


def _read_parquet(config: PromptsConfig, path: str, columns: list[str]) -> pl.DataFrame:
    files = sorted(Path(path).glob("**/*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise prompts_error(config, path, "there is no .parquet file in this folder")
    try:
        scan = pl.scan_parquet(files)
        _check_columns(config, path, columns, scan.collect_schema().names())
        return scan.select(columns).collect()
    except pl.exceptions.PolarsError as error:
        raise prompts_error(config, path, f"cannot be read as Parquet: {error}") from error


def _read_hugging_face(config: PromptsConfig, path: str, split: str, columns: list[str]) -> pl.DataFrame:
    try:
        # Imported here since it is optional.
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        remedy = (
            "install the library `datasets` to read Hugging Face data sets, or give a .jsonl or .parquet file"
        )
        raise prompts_error(config, path, remedy) from error
    try:
        if Path(path).is_dir():
            loaded = datasets.load_from_disk(path)
            data = loaded[split] if isinstance(loaded, Mapping) else loaded
        else:
            data = datasets.load_dataset(path, config.subset or None, split=split)
    except Exception as error:
        # The library's readers and the network may raise anything.
        remedy = (
            f"split {split!r} of this Hugging Face data set cannot be read ({type(error).__name__}: {error})"
        )
        raise prompts_error(config, path, remedy) from error
    _check_columns(config, path, columns, data.column_names)
    frame: pl.DataFrame = data.select_columns(columns).to_polars()
    return frame


def _check_columns(config: PromptsConfig, path: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in there]:
        remedy = f"it has no column {' or '.join(map(repr, missing))}; it has {', '.join(there)}"
        raise prompts_error(config, path, remedy)
