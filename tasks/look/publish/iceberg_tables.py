"""Iceberg tables by pyiceberg: a snapshot for each part, in a catalog of pyiceberg's configuration or in a folder."""

from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table, TableProperties
from pyiceberg.utils.config import Config

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.publish.stored_parts import Mark, StoredPart

NAMESPACE = "rollmill"
"""Namespace of the tables, unless another is given."""


class IcebergTables:
    """The tables NAMESPACE.TABLE of a catalog. The mark of a part is a table property, set by the part's commit.

    Table properties outlive snapshots, which a catalog's maintenance removes.
    """

    def __init__(self, place: str) -> None:
        self._catalog, self._namespace = open_catalog(place)
        self._catalog.create_namespace_if_not_exists(self._namespace)
        self._opened: dict[str, Table] = {}

    def read_mark(self, part: StoredPart) -> int:
        """Return the packed mark of what the table has of a part; 0: nothing."""
        table = self._open(part.table)
        return int(table.properties.get(_property(part), "0")) if table else 0

    def append(self, part: StoredPart, rows: pa.Table, mark: Mark) -> None:
        """Append rows and set the mark of their part, in one commit; columns that the table lacks are added."""
        # As `read_mark` found it: a table that another process has made since is refused.
        table = self._opened.get(part.table) or self._create(part.table, rows.schema)
        with table.transaction() as commit:
            if not {*rows.column_names} <= {*table.schema().column_names}:
                with commit.update_schema() as update:
                    update.union_by_name(rows.schema)
            commit.append(rows, snapshot_properties=part.facts)
            commit.set_properties({_property(part): str(mark.packed)})

    def finish(self) -> None:
        """Do nothing: every commit is complete."""

    def _create(self, name: str, schema: pa.Schema) -> Table:
        # A commit that another one preceded is not repeated: the other may have published the same rows.
        properties = {TableProperties.COMMIT_NUM_RETRIES: "0"}
        table = self._catalog.create_table(f"{self._namespace}.{name}", schema, properties=properties)
        self._opened[name] = table
        return table

    def _open(self, name: str) -> Table | None:
        if name not in self._opened:
            try:
                self._opened[name] = self._catalog.load_table(f"{self._namespace}.{name}")
            except NoSuchTableError:
                return None
        return self._opened[name]


def open_catalog(place: str) -> tuple[Catalog, str]:
    """Open NAME or NAME.NAMESPACE of pyiceberg's configuration, else the catalog in a local folder, catalog.db.

    Raises:
        ConfigError: it is no local folder, and no catalog of this name is configured. A new folder has a / in its path.
    """
    name, _, namespace = place.partition(".")
    if name in Config().get_known_catalogs():
        return load_catalog(name), namespace or NAMESPACE
    if "://" in place:
        remedy = (
            "a catalog in a folder is on a local disk; for others name a catalog of pyiceberg's configuration"
        )
        raise ConfigError("--to", f"iceberg:{place}", remedy)
    if "/" not in place and not Path(place).is_dir():
        remedy = f"pyiceberg's configuration has no catalog {name}; for a catalog in a new folder give iceberg:./{place}"
        raise ConfigError("--to", f"iceberg:{place}", remedy)
    folder = Path(place).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    uris = {"uri": f"sqlite:///{folder / 'catalog.db'}", "warehouse": folder.as_uri()}
    return SqlCatalog(NAMESPACE, **uris), NAMESPACE


def _property(part: StoredPart) -> str:
    return f"rollmill.{part.key}"
