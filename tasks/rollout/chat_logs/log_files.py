"""Read logged conversations from files: JSON Lines of chats or of OpenTelemetry's spans, or Parquet."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_logs.logged_conversation import LoggedConversation, parse_conversation
from rollmill.tasks.rollout.chat_logs.otel_spans import list_answers, list_spans

# What reading a JSON object of another form raises.
_MALFORMED = (EpisodeError, LookupError, TypeError, AttributeError, ValueError)
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class Logs:
    """What some files have.

    Attributes:
        conversations: those that can be trained on, in the order of the files.
        left_out: number of the others, by reason.
    """

    conversations: tuple[LoggedConversation, ...]
    left_out: Counter[str]


def read_logs(paths: Sequence[str]) -> Logs:
    """Read the conversations of files, and of those in folders, in the order of their names.

    A line that cannot be trained on, such as one about a picture, is left out: it must not stop the others.

    Raises:
        ConfigError: a path is missing, or a file cannot be read as JSON or Parquet; names file and line.
    """
    found: list[LoggedConversation] = []
    left_out: Counter[str] = Counter()
    wrong: list[str] = []
    for file in list_log_files(paths):
        equal: Counter[str] = Counter()
        for source, line in _lines(file):
            if isinstance(line, EpisodeError):
                wrong.append(f"{source}: {line}")
                continue
            try:
                parsed = parse_conversation(line, source)
            except EpisodeError as error:
                wrong.append(f"{source}: {error}")
                continue
            if not parsed:
                left_out["have no message of the policy"] += 1
                continue
            if not parsed.log_id:
                digest = parsed.digest
                parsed = replace(parsed, repeat=equal[digest])
                equal[digest] += 1
            found.append(parsed)
    if wrong:
        left_out[f"cannot be trained on (the first: {wrong[0]})"] = len(wrong)
    return Logs(tuple(found), left_out)


def list_log_files(paths: Sequence[str]) -> list[Path]:
    """List files, and those in folders that have one of SUFFIXES; raises ConfigError for a path that is missing or another file."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(each for each in path.rglob("*") if each.is_file() and each.suffix in SUFFIXES)
        elif path.is_file() and path.suffix in SUFFIXES:
            files.append(path)
        else:
            remedy = (
                f"there is no folder of this name, nor a file {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
            )
            raise ConfigError("FILE", str(path), remedy)
    return files


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any] | EpisodeError]]:
    """Yield each conversation of a file as JSON, or why it is none, with where it is."""
    try:
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_lines(file)
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        raise ConfigError("FILE", str(file), f"it cannot be read: {error}") from error


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any] | EpisodeError]]:
    with file.open(encoding="utf-8-sig") as opened:
        for number, text in enumerate(opened, 1):
            source = f"{file}:{number}"
            try:
                line = json.loads(text) if text.strip() else None
            except (ValueError, RecursionError) as error:
                if not text.endswith("\n"):
                    # Another process writes this line now; the next import has it.
                    return
                remedy = f"this line is no JSON ({error}); give one object a line"
                raise ConfigError("FILE", source, remedy) from error
            if line is None:
                continue
            if not isinstance(line, dict) or "resourceSpans" not in line:
                yield source, line if isinstance(line, dict) else EpisodeError("it is no JSON object")
                continue
            try:
                for span in list_spans(line):
                    yield from _read_span(source, span)
            except _MALFORMED as error:
                yield source, EpisodeError(f"its spans have another form than OTLP's: {error}")


def _read_span(source: str, span: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any] | EpisodeError]]:
    try:
        for each in list_answers(span):
            yield f"{source} span {each['id']}", each
    except _MALFORMED as error:
        yield source, EpisodeError(f"a span has another form than OTLP's: {error}")


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any] | EpisodeError]]:
    for number, row in enumerate(pl.read_parquet(file).iter_rows(named=True), 1):
        source = f"{file} row {number}"
        try:
            # Columns of nested values are often JSON text; absent fields of a struct are null.
            for name in ("messages", "tools"):
                if isinstance(row.get(name), str):
                    row[name] = json.loads(row[name])
        except ValueError as error:
            yield source, EpisodeError(f"its {name} are no JSON: {error}")
            continue
        yield source, {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
