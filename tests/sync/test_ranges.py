"""Equal cuts of items that are stored one after another."""

from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.sync.ranges import assign_evenly, cut_evenly, overlap

SIZES = st.lists(st.integers(0, 50), max_size=12)


def test_examples() -> None:
    assert overlap((0, 5), (3, 9)) == (3, 5)
    assert overlap((0, 2), (3, 9)) == (3, 3)
    assert cut_evenly([6, 4], 2) == [[(0, (0, 5))], [(0, (5, 6)), (1, (0, 4))]]
    assert assign_evenly([6, 2, 4], 2) == [0, 1, 1]


@given(SIZES, st.integers(1, 5))
def test_every_number_is_in_exactly_one_range_and_sizes_differ_by_at_most_one(
    sizes: list[int], n_parts: int
) -> None:
    parts = cut_evenly(sizes, n_parts)
    found = [(item, number) for part in parts for item, (first, end) in part for number in range(first, end)]
    assert found == [(item, number) for item, size in enumerate(sizes) for number in range(size)]
    lengths = [sum(end - first for _, (first, end) in part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


@given(SIZES, st.integers(1, 5))
def test_whole_items_are_assigned_to_ranges_in_order(sizes: list[int], n_parts: int) -> None:
    parts = assign_evenly(sizes, n_parts)
    assert parts == sorted(parts)
    assert all(0 <= part < n_parts for part in parts)
