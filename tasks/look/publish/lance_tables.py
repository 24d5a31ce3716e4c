"""Lance tables in a folder, by the library pylance: a version for each part."""

import lance
import pyarrow as pa

from rollmill.tasks.look.publish.stored_parts import Mark, StoredPart

_CONFIG = "rollmill.published."
_READ_UP_TO = "rollmill.read_up_to"
_MARK = "rollmill.mark"


class LanceTables:
    """The tables PLACE/TABLE.lance.

    The commit of a part has its mark among its transaction's properties. Since Lance can remove old versions, `finish` copies
    the marks to the table's configuration, which stays, with the number of the version that they were read up to.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._opened: dict[str, lance.LanceDataset] = {}
        self._marks: dict[str, dict[str, int]] = {}
        self._changed: set[str] = set()

    def read_mark(self, part: StoredPart) -> int:
        """Return the packed mark of what the table has of a part; 0: nothing."""
        return self._marks[part.table].get(part.key, 0) if self._open(part.table) else 0

    def append(self, part: StoredPart, rows: pa.Table, mark: Mark) -> None:
        """Append rows as a version whose properties have the mark of their part; columns that the table lacks are added first."""
        table = self._opened.get(part.table)
        if table and (added := [each for each in rows.schema if each.name not in table.schema.names]):
            table.add_columns(added)
        written = lance.write_dataset(
            rows,
            table or self._location(part.table),
            mode="append" if table else "create",
            transaction_properties=part.facts | {_MARK: str(mark.packed)},
        )
        self._opened[part.table] = written
        self._marks.setdefault(part.table, {})[part.key] = mark.packed
        self._changed.add(part.table)

    def finish(self) -> None:
        """Copy the marks of what was appended to the configuration of its tables."""
        for name in sorted(self._changed):
            table = self._opened[name]
            marks = {f"{_CONFIG}{key}": str(mark) for key, mark in self._marks[name].items()}
            table.update_config({**marks, _READ_UP_TO: str(table.version)})
        self._changed.clear()

    def _location(self, name: str) -> str:
        return f"{self._place}/{name}.lance"

    def _open(self, name: str) -> lance.LanceDataset | None:
        if name not in self._opened:
            try:
                table = lance.dataset(self._location(name))
            # Lance reports a missing table so.
            except ValueError:
                return None
            self._opened[name], self._marks[name] = table, _read_marks(table)
        return self._opened[name]


def _read_marks(table: lance.LanceDataset) -> dict[str, int]:
    config = table.config()
    marks = {key.removeprefix(_CONFIG): int(mark) for key, mark in config.items() if key.startswith(_CONFIG)}
    read_up_to = int(config.get(_READ_UP_TO, "0"))
    for version in sorted(each["version"] for each in table.versions()):
        commit = table.read_transaction(version) if version > read_up_to else None
        facts = (commit.transaction_properties or {}) if commit else {}
        if _MARK in facts:
            marks[f"{facts['rollmill.run']}/{facts['rollmill.partition']}"] = int(facts[_MARK])
    return marks
