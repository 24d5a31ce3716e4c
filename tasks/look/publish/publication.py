"""`rollmill publish`: the rows of finished steps as tables of a lakehouse, each row once, however often it is called."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
from rich.text import Text

from rollmill.tasks.errors import ConfigError, RollmillError, StoreError
from rollmill.tasks.look.publish.stored_parts import Mark, StoredPart, list_parts
from rollmill.tasks.store.folders import PARTITION_KEYS, RunFolder

PUBLISHED = ("rollouts", "scores", "groups", "batches", "evaluations", "metrics")
"""Data sets that are published unless others are named."""
FORMS = "delta:PATH, iceberg:PATH, iceberg:CATALOG.NAMESPACE, lance:PATH or huggingface:USER/NAME"


class Place(Protocol):
    """Tables that rows are published to, in one format."""

    def read_mark(self, part: StoredPart) -> int:
        """Return the packed mark of what the table of a part has of it; 0: nothing."""

    def append(self, part: StoredPart, rows: pa.Table, mark: Mark) -> None:
        """Append rows of a part and set its mark, both or neither; adds the table, and columns, that are missing."""

    def finish(self) -> None:
        """Commit what `append` has gathered."""


@dataclass
class Publication:
    """What was published.

    Attributes:
        rows: rows appended, by table.
        parts: parts with such rows, by table; each is a commit, on the hub a file.
        replaced: parts whose stored rows are not those that were published, as texts for a message.
    """

    rows: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    replaced: list[str] = field(default_factory=list)

    def publish_part(self, part: StoredPart, place: Place, to: str) -> None:
        """Append the rows of a part that its table lacks.

        Rows that were replaced since they were published stay as they are in the table, and nothing is appended. So it is with copied
        rows of which the table has more already.
        """
        what = f"{part.dataset}/{part.place} of run {part.run}"
        with _naming(what, to):
            known = Mark.unpack(place.read_mark(part))
        # The table has a part under this name already: other rows than the first ones must not follow them.
        if known.rows and part.mark(known.rows) != known:
            self.replaced += [f"{part.folder.location}: {part.dataset}/{part.place}"] if part.is_own else []
        elif part.n_rows > known.rows:
            rows = part.read_rows(known.rows)
            with _naming(what, to):
                place.append(part, rows, part.mark(part.n_rows))
            self.rows[part.table] += rows.num_rows
            self.parts[part.table] += 1


def publish_runs(folders: Sequence[RunFolder], to: str, datasets: Sequence[str] = ()) -> Publication:
    """Append the rows of finished steps of runs to tables, those that they lack; each step's rows of a data set are a commit.

    Args:
        folders: the runs.
        to: format and place, one of FORMS.
        datasets: names of data sets; empty: those of PUBLISHED.

    Raises:
        ConfigError: unknown format, place or data set, or a library is missing.
        StoreError: rows could not be read, or not be published. The same call publishes what is missing.
    """
    known = [name for name, keys in PARTITION_KEYS.items() if {"step", "version"} & {*keys}]
    for name in datasets:
        if name not in known:
            raise ConfigError(
                "--dataset", name, f"it cannot be published; the data sets are {', '.join(known)}"
            )
    with _naming("anything", to):
        place = open_place(to)
    published = Publication()
    for folder in folders:
        for dataset in datasets or PUBLISHED:
            for part in list_parts(folder, dataset):
                published.publish_part(part, place, to)
    with _naming("the last rows", to):
        place.finish()
    return published


def open_place(to: str) -> Place:
    """Open the place of published tables; raises ConfigError for an unknown one, or if its library is missing."""
    form, _, place = to.partition(":")
    if not place:
        raise ConfigError("--to", to, f"give {FORMS}")
    try:
        match form:
            case "delta":
                from rollmill.tasks.look.publish.delta_tables import DeltaTables

                return DeltaTables(place)
            case "iceberg":
                from rollmill.tasks.look.publish.iceberg_tables import IcebergTables

                return IcebergTables(place)
            case "lance":
                from rollmill.tasks.look.publish.lance_tables import LanceTables

                return LanceTables(place)
            case "huggingface":
                from rollmill.tasks.look.publish.hub_dataset import HubDataset

                return HubDataset(place)
            case _:
                raise ConfigError("--to", to, f"unknown format; give {FORMS}")
    except ModuleNotFoundError as error:
        raise ConfigError("--to", to, f"it needs {error.name}: pip install 'rollmill[publish]'") from error


@contextmanager
def _naming(what: str, to: str) -> Iterator[None]:
    """Report an error of a format's library, of whatever class, with what was published and where."""
    try:
        yield
    except RollmillError:
        raise
    except Exception as error:
        # Delta's are trees of many coloured lines.
        reason = " ".join(Text.from_ansi(str(error)).plain.split())
        raise StoreError(
            f"cannot publish {what} to {to}: {reason}\nwhat was published before stays; the same command continues"
        ) from error
