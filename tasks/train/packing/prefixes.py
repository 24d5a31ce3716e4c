"""Groups of rows with a common prefix, such as a prompt, whose tokens are computed once.

A token's hidden state depends on nothing but the tokens up to it, so what rows have in common before their first
trained token has the same states in each of them, and the gradients that flow into those add up.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rollmill.tasks.train.samples import Samples

_LEAST_SAVED_SHARE = 0.05
"""Below this share of their tokens, writing shared ones out again for the attention costs what sharing them saves."""


class PrefixGroup(NamedTuple):
    """Rows whose first `shared` tokens are the same; with one row nothing is shared.

    A row of several segments has its own tokens of each once.

    Attributes:
        rows: row numbers, longest first.
        lengths: number of tokens of each row, the shared ones included.
        shared: number of tokens that all rows begin with; none of them is trained.

    Example: three rows of 10, 8 and 7 tokens with a prompt of 5 take 5 + 5 + 3 + 2 = 15 computed tokens.
    """

    rows: list[int]
    lengths: list[int]
    shared: int

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed, the shared ones once."""
        return sum(self.lengths) - self.shared * (len(self.rows) - 1)


def group_by_prefix(samples: Samples, rows: Sequence[int]) -> list[PrefixGroup]:
    """Group rows with the same tokens before their first trained one, so that these are computed once.

    A row is alone in its group if no other row has its prefix, if sharing saves less than `_LEAST_SAVED_SHARE` of the tokens,
    or if the batch has routed experts: the same tokens may have been routed differently.

    Args:
        samples: the batch.
        rows: row numbers to group; each row has a trained token.
    """
    groups: dict[object, list[int]] = {}
    for row in rows:
        # Rows with replayed routing may differ in the experts of equal tokens, and so in hidden states.
        outline = samples.outline(row)
        prefix = (outline.n_prefix, outline.prefix_high, outline.prefix_low)
        groups.setdefault(row if samples.routing else prefix, []).append(row)
    return [unit for group in groups.values() for unit in _build_groups(samples, group)]


def _build_groups(samples: Samples, rows: list[int]) -> list[PrefixGroup]:
    lengths = {row: samples.outline(row).n_tokens for row in rows}
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    shared = samples.outline(rows[0]).n_prefix
    if shared * (len(rows) - 1) < _LEAST_SAVED_SHARE * sum(lengths.values()):
        shared = 0
    if shared and len(rows) > 1:
        return [PrefixGroup(ordered, [lengths[row] for row in ordered], shared)]
    return [PrefixGroup([row], [lengths[row]], 0) for row in ordered]


def split_groups(units: Sequence[PrefixGroup], budget_tokens: int, most_rows: int) -> list[PrefixGroup]:
    """Split prefix groups into groups of at most `budget_tokens` tokens and `most_rows` rows.

    A row longer than the budget gets a group to itself.
    """
    parts = []
    for unit in units:
        start, tokens = 0, 0
        for place, length in enumerate(unit.lengths):
            # The first row of a group computes the shared tokens, the others only what follows them.
            added = length - unit.shared if place > start else length
            if place > start and (tokens + added > budget_tokens or place - start == most_rows):
                parts.append(_slice_group(unit, start, place))
                start, tokens, added = place, 0, length
            tokens += added
        parts.append(_slice_group(unit, start, len(unit.rows)))
    return parts


def _slice_group(unit: PrefixGroup, start: int, end: int) -> PrefixGroup:
    return PrefixGroup(unit.rows[start:end], unit.lengths[start:end], unit.shared if end - start > 1 else 0)
