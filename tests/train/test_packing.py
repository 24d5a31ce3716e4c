"""Plans of micro-batches, in both layouts, on drawn lengths."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.train.packing.packing_plan import TokenBudget, pack_padded, pack_varlen
from rollmill.tasks.train.packing.prefixes import PrefixGroup, split_groups

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
RANKS = st.integers(1, 5)
BUDGETS = st.integers(1, 600)


@st.composite
def units(draw: st.DrawFn) -> list[PrefixGroup]:
    """Draw groups of rows that share a prompt."""
    found, row = [], 0
    for n_rows in draw(st.lists(st.integers(1, 8), max_size=10)):
        shared = draw(st.integers(1, 100)) if n_rows > 1 else 0
        lengths = sorted((shared + draw(st.integers(1, 100)) for _ in range(n_rows)), reverse=True)
        found.append(PrefixGroup(list(range(row, row + n_rows)), lengths, shared))
        row += n_rows
    return found


def single_units(lengths: list[int]) -> list[PrefixGroup]:
    """Every row by itself."""
    return [PrefixGroup([row], [length], 0) for row, length in enumerate(lengths)]


def tokens_of(rows: list[int], units: list[PrefixGroup]) -> int:
    """Tokens of a micro-batch in a line, counted row by row."""
    unit_of = {row: (number, unit) for number, unit in enumerate(units) for row in unit.rows}
    seen: dict[int, int] = defaultdict(int)
    total = 0
    for row in rows:
        number, unit = unit_of[row]
        length = unit.lengths[unit.rows.index(row)]
        total += length - unit.shared if seen[number] else length
        seen[number] += 1
    return total


@given(LENGTHS, RANKS, BUDGETS, st.integers(0, 100))
def test_every_padded_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], n_ranks: int, budget: int, overhead: int
) -> None:
    shares = pack_padded(lengths, n_ranks, TokenBudget(budget, overhead))
    micro_batches = [rows for share in shares for rows in share]

    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        assert len(rows) <= 1 or len(rows) * max(lengths[row] for row in rows) <= budget


@given(LENGTHS, RANKS, BUDGETS)
def test_ranks_have_as_many_micro_batches_and_nearly_as_many_tokens(
    lengths: list[int], n_ranks: int, budget: int
) -> None:
    for shares in (
        pack_padded(lengths, n_ranks, TokenBudget(budget)),
        pack_varlen(single_units(lengths), n_ranks, budget),
    ):
        tokens = [sum(lengths[row] for rows in share for row in rows) for share in shares]

        assert len({len(share) for share in shares}) == 1
        assert max(tokens) - min(tokens) <= max(lengths, default=0)
        assert all(rows for share in shares for rows in share[:-1])


@given(units(), RANKS, BUDGETS)
def test_every_row_of_a_packed_sequence_is_in_one_micro_batch_within_the_budget(
    units: list[PrefixGroup], n_ranks: int, budget: int
) -> None:
    shares = pack_varlen(units, n_ranks, budget)
    micro_batches = [rows for share in shares for rows in share]

    assert sorted(row for rows in micro_batches for row in rows) == [
        row for unit in units for row in sorted(unit.rows)
    ]
    assert len({len(share) for share in shares}) == 1
    for rows in micro_batches:
        assert len(rows) <= 1 or tokens_of(rows, units) <= budget


@given(units(), RANKS, BUDGETS)
def test_slowest_rank_never_waits_longer_with_shared_prompts_than_without(
    units: list[PrefixGroup], n_ranks: int, budget: int
) -> None:
    lengths = {row: length for unit in units for row, length in zip(unit.rows, unit.lengths, strict=True)}
    plain = pack_varlen(single_units([lengths[row] for row in sorted(lengths)]), n_ranks, budget)
    shared = pack_varlen(units, n_ranks, budget)

    def slowest(shares: list[list[list[int]]], units: list[PrefixGroup]) -> int:
        return sum(max(tokens_of(rows, units) for rows in together) for together in zip(*shares, strict=True))

    singles = single_units([lengths[row] for row in sorted(lengths)])
    assert slowest(shared, units) <= slowest(plain, singles)


def test_one_rank_computes_every_shared_prompt_once_when_the_budget_allows() -> None:
    units = [PrefixGroup([0, 1, 2], [10, 8, 7], 5), PrefixGroup([3, 4], [9, 9], 6)]

    (share,) = pack_varlen(units, 1, 100)

    assert share == [[0, 1, 2, 3, 4]]
    assert [each.tokens for each in units] == [15, 12]


@given(units(), BUDGETS, st.integers(1, 8))
def test_split_units_keep_their_rows_and_limits(
    units: list[PrefixGroup], budget: int, most_rows: int
) -> None:
    parts = split_groups(units, budget, most_rows)

    assert [row for part in parts for row in part.rows] == [row for unit in units for row in unit.rows]
    for part in parts:
        assert len(part.rows) <= most_rows
        assert part.tokens <= budget or len(part.rows) == 1


def pad_and_cost(lengths: list[int], cuts: list[list[int]], overhead: int) -> tuple[int, int]:
    widths = [len(rows) * max(lengths[row] for row in rows) for rows in cuts]
    return sum(widths) - sum(lengths), sum(widths) + overhead * len(cuts)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(20, 120), st.integers(0, 30))
def test_no_other_cut_of_the_sorted_rows_costs_less(lengths: list[int], budget: int, overhead: int) -> None:
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    (found,) = pack_padded(lengths, 1, TokenBudget(budget, overhead))
    costs = []
    for bits in range(2 ** (len(order) - 1)):
        cuts = [[order[0]]]
        for place, row in enumerate(order[1:]):
            if bits >> place & 1:
                cuts.append([row])
            else:
                cuts[-1].append(row)
        if all(len(rows) == 1 or len(rows) * lengths[rows[0]] <= budget for rows in cuts):
            costs.append(pad_and_cost(lengths, cuts, overhead)[1])

    assert pad_and_cost(lengths, found, overhead)[1] == min(costs)


def test_padding_of_a_large_batch_is_below_two_percent() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.0, 0.8, 1024), 1, 2048).astype(int).tolist()

    (cuts,) = pack_padded(lengths, 1, TokenBudget(4096, 64))

    assert pad_and_cost(lengths, cuts, 64)[0] < 0.02 * sum(lengths)


def test_examples_of_the_docstring() -> None:
    assert pack_padded([9, 2, 8, 3], 2, TokenBudget(10)) == [[[0], [1]], [[2], [3]]]
    assert pack_padded([9, 2, 8], 2, TokenBudget(10)) == [[[0], []], [[2], [1]]]
    assert pack_padded([], 2, TokenBudget(10)) == [[], []]
    assert pack_varlen([], 2, 10) == [[], []]
