"""Problems from a file or a data set, answered in one turn through the model's chat template."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import msgspec
import numpy as np
import polars as pl

from tasks.errors import ConfigError
from tasks.rollout.config import PromptsConfig, RolloutConfig
from tasks.rollout.environment import Episode, Example, Message, SingleTurn, Split
from tasks.rollout.prompt_files import format_of, read_rows, with_json_values, wrong

CRC_RANGE = 1 << 32

TEXT_TYPES = (pl.String, pl.Categorical, pl.Enum)
MESSAGE_FIELDS = {"role", "content"}


class Prompts:
    """The problems that `rollout.prompts` describes; an example's content is problem, answer and more columns."""

    name = "prompts"
    tools = ()
    stop = ()

    def __init__(self, config: PromptsConfig) -> None:
        self._config, self._splits = config, problems_of(config)

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Read the problems; ConfigError names file, row and column of the first thing that is wrong."""
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
        asked = messages_of(example.content["problem"])
        system = (Message("system", self._config.system),) if self._config.system else ()
        return SingleTurn((*system, *asked))


def messages_of(problem: object) -> tuple[Message, ...]:
    """What a problem opens with: a text is what the user says, a list of messages (or its JSON) is that.

    Raises:
        msgspec.ValidationError: it is a list of something else; a role is unknown, or nothing is in it.
    """
    listed = _listed(problem) if isinstance(problem, str) else problem
    if listed is None:
        return (Message("user", str(problem)),)
    if isinstance(listed, list):
        listed = [_without_nulls(each) for each in listed]
    messages = msgspec.convert(listed, tuple[Message, ...])
    if not messages:
        raise msgspec.ValidationError("Expected at least one message")
    return messages


def _listed(text: str) -> list[object] | None:
    """The list that a text is as JSON, when all in it have a role; None for any other text."""
    if not text.startswith("[{"):
        return None
    try:
        listed = msgspec.json.decode(text, type=list[object])
    except (msgspec.DecodeError, UnicodeError):
        return None  # a text that begins like a list
    return listed if all(isinstance(each, dict) and "role" in each for each in listed) else None


def _without_nulls(message: object) -> object:
    """A message without the fields that only other rows' messages have; typed columns hold null there."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Problems:
    """The rows of a split.

    Attributes:
        frame: the columns that are needed, of the whole file.
        rows: [n] the split's rows in `frame`, counted from 0.
        source: the file or data set.
    """

    frame: pl.DataFrame
    rows: np.ndarray
    source: str


@lru_cache(maxsize=2)
def problems_of(config: PromptsConfig) -> Mapping[Split, Problems]:
    """Both splits, read once in a process.

    Raises:
        ConfigError: a file, a column or a value is missing.
    """
    if not config.path:
        raise ConfigError("rollout.prompts.path", "", "give the file or data set with the problems")
    frame = _read(config, config.path, config.train_split)
    if held_out_path := _held_out_path(config):
        held_out = _read(config, held_out_path, config.held_out_split or config.train_split)
        return {
            "train": _first(config, frame, np.ones(len(frame), bool), config.path),
            "held_out": _first(config, held_out, np.ones(len(held_out), bool), held_out_path),
        }
    is_train, is_held_out = _by_column(config, frame) if config.split_column else _by_share(config, frame)
    return {
        "train": _first(config, frame, is_train, config.path),
        "held_out": _first(config, frame, is_held_out, config.path),
    }


def _held_out_path(config: PromptsConfig) -> str:
    """Where the held-out problems are when they are not among the training problems."""
    if config.held_out_path or config.split_column or not config.held_out_split:
        return config.held_out_path
    return config.path if format_of(config, config.path) == "huggingface" else ""


def _read(config: PromptsConfig, path: str, split: str) -> pl.DataFrame:
    named = [config.prompt_column, config.answer_column, config.split_column, *config.columns]
    frame = read_rows(config, path, split, [name for name in named if name])
    for name in filter(None, (config.prompt_column, config.answer_column)):
        if len(missing := np.flatnonzero(frame[name].is_null().to_numpy())):
            remedy = f"row {missing[0]} (counted from 0) has no {name!r}; {len(missing)} of {len(frame)} rows have none"
            raise wrong(config, path, remedy)
    _check_prompts(config, path, frame[config.prompt_column])
    frame = with_json_values(config, path, frame)
    return _with_answers(config, path, frame) if config.answer_pattern and config.answer_column else frame


def _check_prompts(config: PromptsConfig, path: str, prompts: pl.Series) -> None:
    """ConfigError when the column holds neither texts nor messages, or a row that would open no episode."""
    kind = prompts.dtype
    if isinstance(kind, TEXT_TYPES):
        rows = prompts.cast(pl.String).str.starts_with("[{").arg_true()
    elif _is_of_messages(kind):
        rows = pl.arange(len(prompts), eager=True)
    else:
        remedy = f"the column {prompts.name!r} is of type {kind}: expected a text, or a list of messages {{role, content}}"
        raise wrong(config, path, remedy)
    for row in rows:
        try:
            messages_of(prompts[row] if isinstance(kind, TEXT_TYPES) else prompts[row].to_list())
        except msgspec.ValidationError as error:
            remedy = f"row {row} (counted from 0) has no messages in {prompts.name!r}: {error}"
            raise wrong(config, path, remedy) from error


def _is_of_messages(kind: pl.DataType) -> bool:
    inner = kind.inner if isinstance(kind, pl.List | pl.Array) else None
    return isinstance(inner, pl.Struct) and {field.name for field in inner.fields} >= MESSAGE_FIELDS


def _with_answers(config: PromptsConfig, path: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The answers replaced by what `answer_pattern` finds in them."""
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


def _by_column(config: PromptsConfig, frame: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """([rows] bool of the training split, [rows] bool of the held-out one), by the column that names it."""
    split = frame[config.split_column].cast(pl.String)
    is_train = (split == config.train_split).fill_null(value=False).to_numpy()
    held_out = (
        ~is_train if not config.held_out_split else (split == config.held_out_split).fill_null(value=False)
    )
    if not is_train.any():
        there = ", ".join(map(repr, split.unique().sort().to_list()[:5]))
        remedy = f"the column {config.split_column!r} of {config.path} says {there}, and so on"
        raise ConfigError("rollout.prompts.train_split", config.train_split, remedy)
    return is_train, np.asarray(held_out)


def _by_share(config: PromptsConfig, frame: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The same, by the crc32 of the problems, so that equal problems are in the same split."""
    crcs = (zlib.crc32(str(problem).encode()) for problem in frame[config.prompt_column])
    is_held_out = np.fromiter(crcs, np.int64, len(frame)) < config.held_out_share * CRC_RANGE
    return ~is_held_out, is_held_out


def _first(config: PromptsConfig, frame: pl.DataFrame, chosen: np.ndarray, source: str) -> Problems:
    rows = np.flatnonzero(chosen)
    return Problems(frame, rows[: config.max_prompts] if config.max_prompts else rows, source)
