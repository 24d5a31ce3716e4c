"""A table of rows: as JSON values, for a terminal of any width, and in markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

LEAST_TEXT = 14
"""Characters that a text column is worth showing with."""
GAP = 2
"""Spaces between two columns."""

_CONTROL = {chr(code): chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | {
    "\x7f": "␡",
    **{chr(code): "�" for code in range(0x80, 0xA0)},
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column as it is shown.

    Attributes:
        name: key of a row.
        rank: those of the highest rank are left out first where the terminal is narrow.
        header: its heading; the name by default.
        is_text: True for text of any length, which is shortened to what is left of the line.
        digits: after the point of a number that is no integer.
    """

    name: str
    rank: int = 0
    header: str = ""
    is_text: bool = False
    digits: int = 3

    @property
    def heading(self) -> str:
        """What stands above it."""
        return self.header or self.name

    def cell(self, row: Mapping[str, object]) -> str:
        """A value as a person reads it, on one line; "-" for none and NaN."""
        value = row[self.name]
        if isinstance(value, float):
            return "-" if math.isnan(value) else f"{value:.{self.digits}f}"
        return "-" if value is None else visible(" ".join(str(value).split()))


@dataclass(frozen=True, slots=True)
class View:
    """One table.

    Attributes:
        values: all of it, as JSON values.
        notes: lines below the table.
    """

    values: Mapping[str, object]
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, object]]
    notes: Sequence[str] = field(default=())

    def table(self, width: int | None = None) -> Table:
        """The rows for a terminal of `width` characters: as many columns as fit, no heading broken; None: all."""
        shown = self._fitting(width)
        left_out = [column.name for column in self.columns if column.name not in shown]
        notes = [*self.notes, *([f"not shown here: {', '.join(left_out)}"] if left_out else [])]
        table = Table(
            title=Text(self.title, style="bold"),
            title_justify="left",
            caption=Text("\n".join(notes)) if notes else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
        )
        columns = [column for column in self.columns if column.name in shown]
        for column in columns:
            is_number = all(isinstance(row[column.name], int | float | None) for row in self.rows)
            table.add_column(Text(column.heading), justify="right" if is_number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(_shortened(column.cell(row), shown[column.name])) for column in columns))
        return table

    def markdown(self) -> list[str]:
        """The rows as lines of a markdown table."""
        rows = [[column.cell(row).replace("|", "\\|") for column in self.columns] for row in self.rows]
        headings = [column.heading for column in self.columns]
        return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]

    def _fitting(self, width: int | None) -> dict[str, int]:
        """Width of each column that is shown, by name."""
        natural = {
            column.name: max(len(column.heading), *(len(column.cell(row)) for row in self.rows), 1)
            for column in self.columns
        }
        if width is None:
            return natural
        texts = {column.name for column in self.columns if column.is_text}
        least = {
            name: max(min(each, LEAST_TEXT), 1) if name in texts else each for name, each in natural.items()
        }
        for column in sorted(self.columns, key=lambda column: -column.rank):
            if _line(least) <= width or len(least) == 1:
                break
            del least[column.name]
        for name in (name for name in least if name in texts):
            least[name] = min(natural[name], least[name] + max(0, width - _line(least)))
        return least


def without_alike(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, object]],
    alike: Sequence[str],
    unset: Sequence[str] = (),
) -> list[Column]:
    """The columns that say something of these rows.

    Args:
        columns: of the table.
        rows: that it shows.
        alike: columns that go where all rows have one value.
        unset: columns that go where no row has a value.
    """
    gone = {name for name in alike if len({row[name] for row in rows}) < 2}
    gone |= {name for name in unset if not any(row[name] for row in rows)}
    return [column for column in columns if column.name not in gone]


def visible(text: str) -> str:
    """Text whose control characters can be seen and do nothing to the terminal; line ends and tabs stay.

    Example: an escape character is ␛.
    """
    return "".join(_CONTROL.get(character, character) for character in text)


def _line(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(1, width - 1)]}…"
