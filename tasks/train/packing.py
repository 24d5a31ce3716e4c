"""Which rows go through the model together, on which rank: a plan, before anything is moved.

Rows are sorted by length and dealt in tiers of one row a rank, each tier's longest row to the rank with the fewest
tokens, so that all ranks have rows of like length at the same time, as many of them, and nearly as many tokens. Then
the tiers are cut into micro-batches, at the same places on every rank.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from tasks.train.prefixes import Unit, split_units

Layout = Literal["padded", "varlen"]
RowNumbers = list[int]


class Budget(NamedTuple):
    """How large micro-batches are.

    Attributes:
        tokens: most tokens of one, padding included; what is longer by itself has one to itself.
        overhead_tokens: what one more micro-batch costs, as tokens: padding is weighed against it.
    """

    tokens: int
    overhead_tokens: int = 0


def pack(lengths: Sequence[int], n_ranks: int, budget: Budget) -> list[list[RowNumbers]]:
    """Rows padded to the longest of their micro-batch: the cut with the least padding and overhead.

    Args:
        lengths: [B] tokens of each row.
        n_ranks: W.
        budget: of each micro-batch.

    Returns:
        [W] micro-batches of each rank, each a list of row numbers; every rank has the same number of them, and only
        the last may be empty. Without rows every rank has none.

    Example: pack([9, 2, 8, 3], 2, Budget(10)) is [[[0], [1]], [[2], [3]]], and pack([9, 2, 8], 2, Budget(10)) is
        [[[0], []], [[2], [1]]].
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    tiers = _deal(order, lengths, n_ranks)
    ends = _least_cost_ends([lengths[row] for row in order[::n_ranks]], budget)
    return _cut(tiers, ends, n_ranks)


def pack_line(units: Sequence[Unit], n_ranks: int, budget_tokens: int) -> list[list[RowNumbers]]:
    """Rows one after another without padding, those of a unit side by side, as far as they fit.

    Units larger than the budget are split, and smaller ones where the ranks would wait for one another otherwise.

    Args:
        units: rows that share their first tokens, which are computed once where they stay together.
        n_ranks: W.
        budget_tokens: most tokens of a micro-batch.

    Returns:
        As of `pack`.
    """
    most = max((len(unit.rows) for unit in units), default=1)
    plans = [_line_plan(units, n_ranks, budget_tokens, most)]
    while n_ranks > 1 and most > 1:
        most = -(-most // 2)
        plans.append(_line_plan(units, n_ranks, budget_tokens, most))
    return min(plans, key=lambda plan: plan.slowest_tokens).micro_batches


class _LinePlan(NamedTuple):
    micro_batches: list[list[RowNumbers]]
    slowest_tokens: int


def _line_plan(units: Sequence[Unit], n_ranks: int, budget_tokens: int, most_rows: int) -> _LinePlan:
    """The plan with units of no more than `most_rows` rows."""
    pieces = split_units(units, budget_tokens, most_rows)
    costs = [piece.tokens for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda place: (-costs[place], place))
    tiers = _deal(order, costs, n_ranks)
    ends, slowest = _filling_ends(tiers, costs, n_ranks, budget_tokens)
    shares = _cut(tiers, ends, n_ranks)
    rows = [[[row for place in cut for row in pieces[place].rows] for cut in share] for share in shares]
    return _LinePlan(rows, slowest)


def _deal(order: list[int], costs: Sequence[int], n_ranks: int) -> list[list[int | None]]:
    """[tiers][W] items, costliest first: of each tier the costliest goes to the rank with the least so far."""
    loads, tiers = [0] * n_ranks, []
    for start in range(0, len(order), n_ranks):
        tier: list[int | None] = [None] * n_ranks
        ranks = sorted(range(n_ranks), key=lambda rank: (loads[rank], rank))
        for item, rank in zip(order[start : start + n_ranks], ranks, strict=False):
            tier[rank] = item
            loads[rank] += costs[item]
        tiers.append(tier)
    return tiers


def _least_cost_ends(longest: list[int], budget: Budget) -> list[int]:
    """Where micro-batches of tiers end, so that padded tokens and overhead are least in sum.

    Args:
        longest: [tiers] tokens of each tier's longest row, descending.
        budget: of each micro-batch.
    """
    n_tiers = len(longest)
    least, taken = np.zeros(n_tiers + 1, np.int64), np.ones(n_tiers, np.int64)
    for first in range(n_tiers - 1, -1, -1):
        most = min(max(1, budget.tokens // longest[first]), n_tiers - first)
        costs = np.arange(1, most + 1) * longest[first] + least[first + 1 : first + most + 1]
        best = int(costs.argmin())
        least[first], taken[first] = costs[best] + budget.overhead_tokens, best + 1
    ends, at = [], 0
    while at < n_tiers:
        at += int(taken[at])
        ends.append(at)
    return ends


def _filling_ends(
    tiers: list[list[int | None]], costs: Sequence[int], n_ranks: int, budget_tokens: int
) -> tuple[list[int], int]:
    """Where micro-batches of tiers end that are as few as fit and of like size, and the slowest rank's tokens.

    Ranks join after every micro-batch, so the slowest counts in each.
    """
    loads = [sum(costs[item] for item in rank if item is not None) for rank in zip(*tiers, strict=True)]
    whole = max(loads, default=0)
    even = whole / max(1, -(-whole // budget_tokens))
    ends: list[int] = []
    loads, slowest = [0] * n_ranks, 0
    for number, tier in enumerate(tiers):
        wanted = [load + (0 if item is None else costs[item]) for load, item in zip(loads, tier, strict=True)]
        if number and (max(wanted) > budget_tokens or max(loads) >= even):
            ends.append(number)
            slowest += max(loads)
            wanted = [after - before for after, before in zip(wanted, loads, strict=True)]
        loads = wanted
    return ([*ends, len(tiers)], slowest + max(loads)) if tiers else ([], 0)


def _cut(tiers: list[list[int | None]], ends: list[int], n_ranks: int) -> list[list[RowNumbers]]:
    return [
        [
            [item for tier in tiers[start:end] if (item := tier[rank]) is not None]
            for start, end in pairwise([0, *ends])
        ]
        for rank in range(n_ranks)
    ]
