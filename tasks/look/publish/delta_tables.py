"""Delta tables in a folder, by the library deltalake: a commit for each part."""

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from rollmill.tasks.look.publish.stored_parts import Mark, StoredPart


class DeltaTables:
    """The tables PLACE/TABLE. The mark of a part is the version of an application transaction, which its commit sets.

    Of two processes that commit the same part at once, Delta refuses the second.
    """

    def __init__(self, place: str) -> None:
        self._place, self._opened = place, dict[str, DeltaTable]()

    def read_mark(self, part: StoredPart) -> int:
        """Return the packed mark of what the table has of a part; 0: nothing."""
        table = self._open(part.table)
        return (table.transaction_version(part.key) or 0) if table else 0

    def append(self, part: StoredPart, rows: pa.Table, mark: Mark) -> None:
        """Append rows and set the mark of their part, in one commit; columns that the table lacks are added."""
        # As `read_mark` found it: a table that another process has made since is refused.
        table = self._opened.get(part.table)
        write_deltalake(
            table or self._location(part.table),
            rows,
            mode="append" if table else "error",
            schema_mode="merge",
            commit_properties=CommitProperties(
                custom_metadata=part.facts, app_transactions=[Transaction(part.key, mark.packed)]
            ),
        )

    def finish(self) -> None:
        """Do nothing: every commit is complete."""

    def _location(self, name: str) -> str:
        return f"{self._place}/{name}"

    def _open(self, name: str) -> DeltaTable | None:
        if name not in self._opened and DeltaTable.is_deltatable(self._location(name)):
            self._opened[name] = DeltaTable(self._location(name))
        return self._opened.get(name)
