"""Generate the tables of docs/reference/datasets.md from the schemas: `python -m rollmill.tasks.look.export.dataset_docs`."""

import re
from pathlib import Path

import pyarrow as pa

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.schemas import SCHEMAS, STATE_FIELDS

PAGE = Path("docs") / "reference" / "datasets.md"
HEADINGS = ("column", "type", "shape", "unit", "meaning")
_TABLE = re.compile(r"^\| column \|.*\n(?:\|.*\n)*", re.MULTILINE)


def columns_table(schema: pa.Schema) -> str:
    """Format the columns of a data set as a markdown table.

    Example: `step` becomes the line "| step | int32 | | | step, from 0 |".
    """
    lines = [_table_line(HEADINGS), "|---|---|---|---|---|"]
    for field in schema:
        described = [field.metadata.get(key, b"").decode() for key in (b"shape", b"unit", b"meaning")]
        lines.append(_table_line((field.name, str(field.type), *described)))
    return "\n".join(lines) + "\n"


def insert_tables(page: str) -> str:
    """Return `page`, the text of docs/reference/datasets.md, with the table below each heading `## DATASET` generated from its schema.

    Raises:
        SchemaError: a data set has no section, or its section has no table.
    """
    for dataset, schema in {**SCHEMAS, "states": pa.schema(STATE_FIELDS)}.items():
        head, heading, rest = page.partition(f"\n## {dataset}\n")
        section, following, tail = rest.partition("\n## ")
        table = _TABLE.search(section)
        if not heading or table is None:
            raise SchemaError(f"{PAGE} has no section '## {dataset}' with a table of its columns; write one")
        section = section[: table.start()] + columns_table(schema) + section[table.end() :]
        page = head + heading + section + following + tail
    return page


def _table_line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("  ", " ")


if __name__ == "__main__":
    PAGE.write_text(insert_tables(PAGE.read_text()))
