"""Escape text of any origin for markdown, so that it makes no heading, link, image, tag or end of a code block."""

import re
import string
from collections.abc import Mapping

from rollmill.tasks.look.tables.view import Column, View, count_noun, escape_controls

JOINER = "\u2060"
"""Zero-width character; after an ampersand it keeps Prefect's older UI from decoding `&lt;` in code."""
MOST_INLINE = 200
"""Most characters shown of a name or an error."""
MOST_BLOCK = 1500
"""Most characters shown of a message, from its beginning and its end."""


def escape_inline(text: object, most: int = MOST_INLINE) -> str:
    r"""Escape text for one line or a table cell, with a backslash before everything that markdown or HTML interprets.

    Example: `<b>` becomes `\<b\>`, which a page shows as it was.
    """
    line = str(text)
    shown = escape_controls(" ".join(line[: most + 1].split()))
    escaped = re.sub(f"[{re.escape(string.punctuation)}]", r"\\\g<0>", shown[:most])
    return f"{escaped}…" if len(line) > most else escaped


def escape_block(text: str, most: int = MOST_BLOCK) -> list[str]:
    """Return text as lines of a code block whose fence is longer than any in it; long text keeps its beginning and end."""
    shown = re.sub(r"&(?=#?\w+;)", f"&{JOINER}", escape_controls(shorten_text(text, most)))
    runs = [len(run) for run in re.findall(r"`+", shown)]
    fence = "`" * max(3, 1 + max(runs, default=0))
    return [f"{fence}text", *shown.split("\n"), fence]


def make_table(view: View) -> list[str]:
    """Return the rows of a view as lines of a Markdown table: heading, rule, rows. Texts are escaped."""

    def cell(column: Column, row: Mapping[str, object]) -> str:
        shown = column.cell(row)
        return shown if isinstance(row[column.name], int | float | None) else escape_inline(shown)

    headings = [column.heading for column in view.columns]
    rows = [[cell(column, row) for column in view.columns] for row in view.rows]
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def shorten_text(text: str, most: int) -> str:
    """Return the beginning and the end of a long text, with a note of how much is left out; short text is returned unchanged."""
    if len(text) <= most:
        return text
    head, tail = text[: most * 2 // 3], text[-(most // 3) :]
    return f"{head}\n[… {count_noun(len(text) - len(head) - len(tail), 'character')} more …]\n{tail}"
