"""The tables of docs/datasets.md, made from the schemas: `python -m tasks.store.documentation` brings them up to date."""

import re
from pathlib import Path

import pyarrow as pa

from tasks.errors import SchemaError
from tasks.store.schemas import SCHEMAS, STATE_FIELDS

PAGE = Path("docs") / "datasets.md"
HEADINGS = ("column", "type", "shape", "unit", "meaning")
_TABLE = re.compile(r"^\| column \|.*\n(?:\|.*\n)*", re.MULTILINE)


def columns_table(schema: pa.Schema) -> str:
    """The columns of a data set as a markdown table, a line each.

    Example: `step` is the line "| step | int32 | | | step, from 0 |".
    """
    lines = [_line(HEADINGS), "|---|---|---|---|---|"]
    for field in schema:
        told = [field.metadata.get(key, b"").decode() for key in (b"shape", b"unit", b"meaning")]
        lines.append(_line((field.name, str(field.type), *told)))
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """The page with the table of each data set as its schema is, below the heading `## NAME`.

    Raises:
        SchemaError: a data set has no section, or none with a table.
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


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |".replace("  ", " ")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
