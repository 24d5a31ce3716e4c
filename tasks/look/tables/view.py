"""Tables for the terminal, for markdown and as JSON values; with sorting and limits."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from unicodedata import category

import polars as pl
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rollmill.tasks.errors import ConfigError

LEAST_TEXT = 14
"""Smallest width in cells at which a text column is shown."""
GAP = 2
"""Spaces between two columns."""

MOST_MARKS = 4
"""Most combining marks on one character that are shown; languages need up to three or four."""

_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of invisible characters: controls, formats, surrogates, line separators."""
_JOINERS = "\u200c\u200d"
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks without a visible glyph: fillers, variation selectors, the empty Braille cell."""
_OF_EMOJI = "\ufe0e\ufe0f"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: key in the rows.
        rank: columns of the highest rank are left out first if the terminal is narrow, of the same rank the right one. Columns
            that name a row have rank 0 and are the first of their table.
        header: heading; the name by default.
        is_text: True for text of any length, which is shortened to the remaining width.
        digits: decimals of a float.
        absent: text for a missing value.
    """

    name: str
    rank: int = 0
    header: str = ""
    is_text: bool = False
    digits: int = 3
    absent: object = None

    @property
    def heading(self) -> str:
        """Text of the column's heading: `header`, or `name` without one."""
        return self.header or self.name

    def cell(self, row: Mapping[str, object]) -> str:
        """Format a row's value on one line; "-" for a missing value or NaN."""
        value = None if row[self.name] == self.absent else row[self.name]
        if isinstance(value, float):
            return "-" if math.isnan(value) else f"{value:z.{self.digits}f}"
        return "-" if value is None else escape_controls(" ".join(str(value).split()))


@dataclass(frozen=True, slots=True)
class View:
    """A table to print: title, columns, rows and notes, and the same data as JSON values.

    Attributes:
        values: the whole table as JSON values.
        notes: lines below the table.
    """

    values: Mapping[str, object]
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, object]]
    notes: Sequence[str] = field(default=())

    def page(self, width: int | None = None) -> Group:
        """Return title, rows and notes for a terminal of `width` cells, with as many columns as fit; None: all columns."""
        shown = self._fitting(width)
        left_out = [column.heading for column in self.columns if column.name not in shown and self.rows]
        notes = [*self.notes, *([f"not shown here: {', '.join(left_out)}"] if left_out else [])]
        title = [Text(escape_controls(self.title), style="bold")] if self.title else []
        table = [self._table(shown)] if self.rows else []
        return Group(*title, *table, *(Text(escape_controls(note), style="italic dim") for note in notes))

    def _table(self, shown: Mapping[str, int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        columns = [column for column in self.columns if column.name in shown]
        for column in columns:
            is_number = all(isinstance(row[column.name], int | float | None) for row in self.rows)
            table.add_column(
                Text(column.heading),
                justify="right" if is_number else "left",
                no_wrap=True,
                # With a width Rich need not measure every cell, which takes half of the time of a long table.
                width=shown[column.name],
            )
        for row in self.rows:
            table.add_row(*(Text(_shorten_cell(column.cell(row), shown[column.name])) for column in columns))
        return table

    def _fitting(self, width: int | None) -> dict[str, int]:
        """Return the width in cells of each column that fits, by name."""
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
        by_rank = sorted(self.columns, key=lambda column: column.rank)
        # One column stays, even if it is wider than the terminal.
        for column in reversed(by_rank):
            if _line(least) <= width or len(least) == 1:
                break
            del least[column.name]
        for name in (name for name in least if name in texts):
            least[name] = min(natural[name], least[name] + max(0, width - _line(least)))
        return least


def drop_uniform(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, object]],
    alike: Sequence[str],
    unset: Sequence[str] = (),
) -> list[Column]:
    """Drop columns without information: of `alike`, if all rows have the same value; of `unset`, if no row has one."""
    gone = {name for name in alike if len({row[name] for row in rows}) < 2}
    gone |= {name for name in unset if not any(row[name] for row in rows)}
    return [column for column in columns if column.name not in gone]


def escape_controls(text: str) -> str:
    """Replace control, invisible and bidirectional characters of a text by visible symbols or codes.

    Line ends and tabs stay, and so do joiners inside an emoji or a word that needs them. Of more than MOST_MARKS combining marks on
    one character, which would be painted over other lines, the rest is counted.

    Example: an escape character becomes ␛, a right-to-left override <U+202E>, five acute accents four and <+1 mark>.
    """
    if not text.isascii():
        text = _compile_marks().sub(_count_marks, text)
    # Nearly every text is harmless, and two scans in C are quicker than a look at each character.
    if text.isprintable() and not _BLANK.search(text):
        return text
    return "".join(each if _joins(text, at) else _mark(each) for at, each in enumerate(text))


def count_noun(n: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun. Example: for "group" it gives "1 group" and "2 groups"."""
    return f"{n} {noun if n == 1 else plural or f'{noun}s'}"


@cache
def _compile_marks() -> re.Pattern[str]:
    """Return the pattern of more than MOST_MARKS combining marks: those that stay, and the others."""
    marks = [each for each in map(chr, range(0x300, 0x20000)) if category(each) in ("Mn", "Me")]
    basic, others = ("".join(each for each in marks if (each > "\uffff") is high) for high in (False, True))
    # Python searches a set of characters above U+FFFF one by one: the lookahead keeps all others from it.
    mark = f"(?:[{basic}]|(?=[\U00010000-\U0001ffff])[{others}])"
    return re.compile(f"({mark}{{{MOST_MARKS}}})({mark}+)")


def _count_marks(found: re.Match[str]) -> str:
    return f"{found[1]}<+{count_noun(len(found[2]), 'mark')}>"


def _mark(character: str) -> str:
    """Return a visible character unchanged, and a symbol or the code of an invisible one."""
    is_unseen = category(character) in _UNSEEN and character not in "\n\t"
    if not is_unseen and not _BLANK.match(character):
        return character
    code = ord(character)
    # Unicode has symbols of the first 32 controls in their order, and one of the last, DEL.
    return "␡" if character == "\x7f" else chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"


def _joins(text: str, at: int) -> bool:
    """Return True if text[at] is a joiner between visible non-ASCII characters, or an emoji's variation selector."""
    if text[at] not in _JOINERS and text[at] not in _OF_EMOJI:
        return False
    before, after = text[at - 1 : at] if at else "", text[at + 1 : at + 2]
    if text[at] in _OF_EMOJI:
        return after == "\u20e3" or (before > "\x7f" and category(before)[0] == "S")
    around = before + after
    return len(around) == 2 and all(not each.isascii() and category(each)[0] in "LMS" for each in around)


def _line(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _shorten_cell(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(1, width - 1)).rstrip()}…"


def order_rows(frame: pl.DataFrame, columns: Sequence[Column], sort: str, limit: int) -> pl.DataFrame:
    """Sort a frame by a column (a leading - sorts largest first) and return its first `limit` rows; 0: all.

    NaN and missing values come last. A column may be named by its heading.

    Raises:
        ConfigError: the frame has no such column; the error lists the columns.
    """
    if sort:
        asked = sort.removeprefix("-")
        name = next((each.name for each in columns if each.heading == asked), asked)
        if name not in frame.columns:
            raise ConfigError(
                "--sort",
                sort,
                f"rows can be sorted by {', '.join(frame.columns)}; - before it: largest first",
            )
        # Polars sorts NaN above all numbers.
        key = pl.col(name).fill_nan(None) if frame.schema[name].is_float() else pl.col(name)
        frame = frame.sort(key, descending=sort.startswith("-"), nulls_last=True, maintain_order=True)
    return frame.head(limit) if limit else frame


def limit_notes(n_shown: int, n: int, if_none: str = "none yet") -> list[str]:
    """Return the note below a table that shows fewer rows than there are, or `if_none` if there are none; empty if it shows all."""
    if not n:
        return [if_none]
    return [f"{n_shown} of {n}; --limit 0 shows all"] if n_shown < n else []
