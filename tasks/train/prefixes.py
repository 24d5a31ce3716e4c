"""Rows that begin alike, as the rows of a group do with their prompt: their first tokens are computed once.

A token's hidden state depends on nothing but the tokens up to it, so what rows have in common before their first
trained token has the same states in each of them, and the gradients that flow into those add up.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tasks.train.samples import Samples

_LEAST_SAVED_SHARE = 0.05
"""Below this share of their tokens, writing shared ones out again for the attention costs what sharing them saves."""


class Unit(NamedTuple):
    """Rows whose first `shared` tokens are the same; with one row nothing is shared.

    Attributes:
        rows: row numbers, longest first.
        lengths: tokens of each row, the shared ones included.
        shared: tokens that all rows begin with; none of them is trained.

    Example: three rows of 10, 8 and 7 tokens with a prompt of 5 are 5 + 5 + 3 + 2 = 15 tokens.
    """

    rows: list[int]
    lengths: list[int]
    shared: int

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths) - self.shared * (len(self.rows) - 1)


def units_of(samples: Samples, rows: Sequence[int]) -> list[Unit]:
    """The rows, those with the same tokens before their first trained one together, where that saves enough.

    Rows that carry routed experts stay by themselves: the same tokens may have been routed differently.

    Args:
        samples: the batch.
        rows: which of its rows; each has a trained token.
    """
    groups: dict[object, list[int]] = {}
    for row in rows:
        start = int(samples.loss_masks[row].argmax())
        key = row if samples.routing else samples.token_ids[row][:start].tobytes()
        groups.setdefault(key, []).append(row)
    return [unit for group in groups.values() for unit in _units(samples, group)]


def _units(samples: Samples, rows: list[int]) -> list[Unit]:
    lengths = {row: len(samples.token_ids[row]) for row in rows}
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    shared = int(samples.loss_masks[rows[0]].argmax())
    if shared * (len(rows) - 1) < _LEAST_SAVED_SHARE * sum(lengths.values()):
        shared = 0
    if shared and len(rows) > 1:
        return [Unit(ordered, [lengths[row] for row in ordered], shared)]
    return [Unit([row], [lengths[row]], 0) for row in ordered]


def split_units(units: Sequence[Unit], budget_tokens: int, most_rows: int) -> list[Unit]:
    """Units of no more tokens and rows than given; a row that is longer than the budget is one by itself."""
    return [part for unit in units for part in _split(unit, budget_tokens, most_rows)]


def _split(unit: Unit, budget_tokens: int, most_rows: int) -> Iterator[Unit]:
    start, tokens = 0, 0
    for place, length in enumerate(unit.lengths):
        added = length - unit.shared if place > start else length
        if place > start and (tokens + added > budget_tokens or place - start == most_rows):
            yield _part(unit, start, place)
            start, tokens, added = place, 0, length
        tokens += added
    yield _part(unit, start, len(unit.rows))


def _part(unit: Unit, start: int, end: int) -> Unit:
    return Unit(unit.rows[start:end], unit.lengths[start:end], unit.shared if end - start > 1 else 0)
