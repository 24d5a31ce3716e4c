"""Read logged conversations from files: JSON Lines of chats or of OpenTelemetry's spans, or Parquet."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_logs.logged_conversation import LoggedConversation, parse_conversation
from rollmill.tasks.rollout.chat_logs.otel_spans import list_spans

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


def read_logs(paths: Sequence[str]) -> tuple[list[LoggedConversation], int]:
    """Read the conversations of files, and of those in folders, in the order of their names.

    Returns:
        The conversations in which the policy says something, and the number of the others.

    Raises:
        ConfigError: a file is missing, unreadable or of another kind, or a line of it is wrong; names file and line.
    """
    found: list[LoggedConversation] = []
    n_silent = 0
    for file in list_log_files(paths):
        for source, line in _lines(file):
            try:
                parsed = parse_conversation(line, source)
            except EpisodeError as error:
                raise ConfigError(
                    "FILE", source, f"{error}; correct or remove it (docs/improve.md)"
                ) from error
            if parsed:
                found.append(parsed)
            else:
                n_silent += 1
    return found, n_silent


def list_log_files(paths: Sequence[str]) -> list[Path]:
    """List files, and those in folders that have one of SUFFIXES; raises ConfigError for a path that has none."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        logs = [each for each in inside if each.suffix in SUFFIXES]
        if not logs:
            remedy = f"there is no file {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} of this name or in this folder"
            raise ConfigError("FILE", str(path), remedy)
        files += logs
    return files


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each conversation of a file as JSON, with where it is."""
    try:
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_lines(file)
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        raise ConfigError("FILE", str(file), f"it cannot be read: {error}") from error


def _json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding="utf-8") as opened:
        for number, text in enumerate(opened, 1):
            if not text.strip():
                continue
            source = f"{file}:{number}"
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ConfigError(
                    "FILE", source, f"this line is no JSON ({error}); give one object a line"
                ) from error
            if not isinstance(line, dict):
                raise ConfigError("FILE", source, "this line is no JSON object")
            if "resourceSpans" not in line:
                yield source, line
                continue
            try:
                for span in list_spans(line):
                    yield f"{source} span {span['id']}", span
            except (EpisodeError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    "FILE", source, f"its spans have another form than OTLP's: {error}"
                ) from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(pl.read_parquet(file).iter_rows(named=True), 1):
        # Columns of nested values are often JSON text; absent fields of a struct are null.
        for name in ("messages", "tools"):
            if isinstance(row.get(name), str):
                row[name] = json.loads(row[name])
        yield f"{file} row {number}", {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
