"""Plans which rows go through the model together, on which rank; pure functions of lengths.

Rows are sorted by length and dealt in tiers of one row a rank, each tier's longest row to the rank with the fewest
tokens, so that all ranks have rows of like length at the same time, as many of them, and nearly as many tokens. Then
the tiers are cut into micro-batches, at the same places on every rank.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from rollmill.tasks.train.packing.prefixes import PrefixGroup, split_groups

Layout = Literal["padded", "varlen"]
RowNumbers = list[int]


class TokenBudget(NamedTuple):
    """Limit on the tokens of a micro-batch, and the cost of one more micro-batch.

    Attributes:
        tokens: largest number of tokens of a micro-batch, padding included; a longer row has a micro-batch to itself.
        overhead_tokens: cost of one more micro-batch in tokens, weighed against padding.
    """

    tokens: int
    overhead_tokens: int = 0


def pack_padded(lengths: Sequence[int], n_ranks: int, budget: TokenBudget) -> list[list[RowNumbers]]:
    """Divide rows into micro-batches padded to their longest row, with the least padding and overhead.

    Args:
        lengths: [B] tokens of each row.
        n_ranks: number of ranks, W.
        budget: limit on each micro-batch's tokens, and the overhead of one.

    Returns:
        [W] micro-batches of each rank, each a list of row numbers; every rank has the same number of them, and only
        the last may be empty. Without rows every rank has none.

    Example: pack_padded([9, 2, 8, 3], 2, TokenBudget(10)) is [[[0], [1]], [[2], [3]]], and
        pack_padded([9, 2, 8], 2, TokenBudget(10)) is [[[0], []], [[2], [1]]].
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    tiers = _deal(order, lengths, n_ranks)
    ends = _least_cost_ends([lengths[row] for row in order[::n_ranks]], budget)
    return _cut(tiers, ends, n_ranks)


def pack_varlen(units: Sequence[PrefixGroup], n_ranks: int, budget_tokens: int) -> list[list[RowNumbers]]:
    """Plan micro-batches of packed sequences, rows with a common prefix together as far as they fit.

    Groups larger than the budget are split, and smaller ones where ranks would otherwise wait for one another.

    Args:
        units: groups of rows that share their first tokens, which are computed once for rows of one micro-batch.
        n_ranks: number of ranks, W.
        budget_tokens: largest number of tokens of a micro-batch.

    Returns:
        [W] micro-batches of each rank, each a list of row numbers, as `pack_padded` returns them.
    """
    most = max((len(unit.rows) for unit in units), default=1)
    plans = [_plan_varlen(units, n_ranks, budget_tokens, most)]
    # Larger groups share more, smaller ones leave the ranks more equal: the sizes are tried by halves.
    while n_ranks > 1 and most > 1:
        most = -(-most // 2)
        plans.append(_plan_varlen(units, n_ranks, budget_tokens, most))
    micro_batches, _ = min(plans, key=lambda plan: plan[1])
    return micro_batches


def _plan_varlen(
    units: Sequence[PrefixGroup], n_ranks: int, budget_tokens: int, most_rows: int
) -> tuple[list[list[RowNumbers]], int]:
    """Divide prefix groups, split to at most `most_rows` rows each, into micro-batches.

    Returns:
        [W] micro-batches of each rank, as row numbers; and the tokens that the ranks compute, the slowest one counted for each
        micro-batch.
    """
    pieces = split_groups(units, budget_tokens, most_rows)
    costs = [piece.tokens for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda place: (-costs[place], place))
    tiers = _deal(order, costs, n_ranks)
    ends, slowest = _filling_ends(tiers, costs, n_ranks, budget_tokens)
    shares = _cut(tiers, ends, n_ranks)
    rows = [[[row for place in cut for row in pieces[place].rows] for cut in share] for share in shares]
    return rows, slowest


def _deal(order: list[int], costs: Sequence[int], n_ranks: int) -> list[list[int | None]]:
    """Deal items to the ranks in tiers of one item per rank, so that the ranks' costs are about equal.

    Args:
        order: numbers of the items, costliest first.
        costs: cost of each item, by the item's number.
        n_ranks: number of ranks, W.

    Returns:
        [tiers][W] numbers of items, one tier for each round; the costliest item of a tier goes to the rank with the least cost
        so far. None fills up the last tier.
    """
    loads, tiers = [0] * n_ranks, []
    for start in range(0, len(order), n_ranks):
        tier: list[int | None] = [None] * n_ranks
        ranks = sorted(range(n_ranks), key=lambda rank: (loads[rank], rank))
        for item, rank in zip(order[start : start + n_ranks], ranks, strict=False):
            tier[rank] = item
            loads[rank] += costs[item]
        tiers.append(tier)
    return tiers


def _least_cost_ends(longest: list[int], budget: TokenBudget) -> list[int]:
    """Cut consecutive tiers (one row for each rank) into micro-batches with the least sum of padded tokens and overhead.

    A micro-batch is padded to the longest row of its first tier.

    Args:
        longest: [tiers] tokens of each tier's longest row, descending.
        budget: limit on each micro-batch's tokens, and the overhead of one.

    Returns:
        For each micro-batch, the number of the tier after its last one.
    """
    n_tiers = len(longest)
    least, taken = np.zeros(n_tiers + 1, np.int64), np.ones(n_tiers, np.int64)
    # From the last tier backwards: least[first] is the least cost of the tiers from `first` on.
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
    """Cut consecutive tiers (one item for each rank) into micro-batches, as few and as equal as the budget allows.

    Returns:
        For each micro-batch the number of the tier after its last one; and the tokens of the slowest rank, summed over the
        micro-batches: ranks wait for each other after each.
    """
    loads = [sum(costs[item] for item in rank if item is not None) for rank in zip(*tiers, strict=True)]
    whole = max(loads, default=0)
    # Equal micro-batches instead of full ones and a short last one: ranks wait for the slowest in each.
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
