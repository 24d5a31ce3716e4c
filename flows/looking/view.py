"""A table of rows: as JSON values, for a terminal of any width, and in markdown."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from unicodedata import category

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

LEAST_TEXT = 14
"""Cells that a text column is worth showing with."""
GAP = 2
"""Spaces between two columns."""

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of what has no shape of its own: controls, formats, surrogates, separators of lines."""
_JOINERS = "\u200c\u200d"
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that are drawn as nothing: fillers, selectors of variants, Braille's empty cell."""
_OF_EMOJI = "\ufe0e\ufe0f"


@dataclass(frozen=True, slots=True)
class Column:
    """One column as it is shown.

    Attributes:
        name: key of a row.
        rank: those of the highest rank are left out first where the terminal is narrow.
        header: its heading; the name by default.
        is_text: True for text of any length, which is shortened to what is left of the line.
        digits: after the point of a number that is no integer.
        absent: the value that stands for none.
    """

    name: str
    rank: int = 0
    header: str = ""
    is_text: bool = False
    digits: int = 3
    absent: object = None

    @property
    def heading(self) -> str:
        """What stands above it."""
        return self.header or self.name

    def cell(self, row: Mapping[str, object]) -> str:
        """A value as a person reads it, on one line; "-" for none and NaN."""
        value = None if row[self.name] == self.absent else row[self.name]
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

    def page(self, width: int | None = None) -> Group:
        """Title, rows and notes for a terminal of `width` cells: as many columns as fit, no heading broken; None: all."""
        shown = self._fitting(width)
        left_out = [column.heading for column in self.columns if column.name not in shown]
        notes = [*self.notes, *([f"not shown here: {', '.join(left_out)}"] if left_out else [])]
        title = [Text(self.title, style="bold")] if self.title else []
        return Group(*title, self._table(shown), *(Text(note, style="italic dim") for note in notes))

    def _table(self, shown: Mapping[str, int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
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
        """Width in cells of each column that is shown, by name."""
        natural = {
            column.name: max(cell_len(column.heading), *(cell_len(column.cell(row)) for row in self.rows), 1)
            for column in self.columns
        }
        if width is None:
            return natural
        texts = {column.name: cell_len(column.heading) for column in self.columns if column.is_text}
        least = {
            name: max(min(each, LEAST_TEXT), texts[name]) if name in texts else each
            for name, each in natural.items()
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
    """Text whose every character can be seen, so that none commands the terminal or turns what is read around.

    Line ends and tabs stay, and joiners inside an emoji or a word that needs them.

    Example: an escape character is ␛, a right-to-left override <U+202E>.
    """
    if text.isprintable() and not _BLANK.search(text):
        return text
    return "".join(
        _mark(each) if _is_unseen(each) and not _joins(text, at) else each for at, each in enumerate(text)
    )


def counted(n: int, noun: str, plural: str = "") -> str:
    """So many things, in words. Example: of "group" it makes "1 group" and "2 groups"."""
    return f"{n} {noun if n == 1 else plural or f'{noun}s'}"


def _is_unseen(character: str) -> bool:
    return (category(character) in _UNSEEN and character not in "\n\t") or bool(_BLANK.match(character))


def _mark(character: str) -> str:
    code = ord(character)
    return "␡" if character == "\x7f" else chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"


def _joins(text: str, at: int) -> bool:
    """True for a joiner between two characters beyond ASCII that have a shape, and for the selector of an emoji."""
    before, after = text[at - 1 : at] if at else "", text[at + 1 : at + 2]
    if text[at] in _OF_EMOJI:
        return after == "\u20e3" or (before > "\x7f" and category(before)[0] == "S")
    around = before + after
    return (
        text[at] in _JOINERS
        and len(around) == 2
        and all(not each.isascii() and category(each)[0] in "LMS" for each in around)
    )


def _line(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _shortened(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(1, width - 1)).rstrip()}…"
