from hypothesis import given
from hypothesis import strategies as st

from tasks.train.packing import pack

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 600))
def test_every_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], n_ranks: int, budget: int
) -> None:
    shares = pack(lengths, n_ranks, budget)
    micro_batches = [rows for share in shares for rows in share]

    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    for rows in micro_batches:
        assert len(rows) <= 1 or len(rows) * max(lengths[row] for row in rows) <= budget


@given(LENGTHS, st.integers(1, 5), st.integers(1, 600))
def test_ranks_have_as_many_micro_batches_and_nearly_as_many_tokens(
    lengths: list[int], n_ranks: int, budget: int
) -> None:
    shares = pack(lengths, n_ranks, budget)
    tokens = [sum(lengths[row] for rows in share for row in rows) for share in shares]

    assert len({len(share) for share in shares}) == 1
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_examples_of_the_docstring() -> None:
    assert pack([9, 2, 8, 3], 2, 10) == [[[0], [1]], [[2], [3]]]
    assert pack([9, 2, 8], 2, 10) == [[[0], []], [[2], [1]]]
    assert pack([], 2, 10) == [[], []]
