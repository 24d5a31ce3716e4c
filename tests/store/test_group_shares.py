"""Which environment each group of a run belongs to."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.store.run.group_ranges import group_numbers
from rollmill.tasks.store.run.group_shares import GroupShares

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)


@given(WEIGHTS, st.integers(1, 9), st.integers(0, 3))
def test_no_number_of_groups_gives_an_environment_one_more_or_less_than_its_share(
    weights: tuple[int, ...], groups_per_step: int, refills: int
) -> None:
    shares, total = GroupShares(weights, groups_per_step, refills), sum(weights)
    planned = group_numbers([shares.plan(step) for step in range(2 * total)])
    counts = accumulate(
        (Counter([shares.environment(group)]) for group in planned), lambda so_far, one: so_far + one
    )
    for n, count in enumerate(counts, start=1):
        assert all(abs(count[at] * total - n * weight) < total for at, weight in enumerate(weights))


@given(WEIGHTS, st.integers(1, 4), st.integers(0, 3), st.integers(0, 500))
def test_every_step_has_exactly_the_shares_if_they_are_whole(
    weights: tuple[int, ...], factor: int, refills: int, step: int
) -> None:
    shares = GroupShares(weights, factor * sum(weights), refills)
    groups = group_numbers([shares.plan(step)])
    assert Counter(map(shares.environment, groups)) == {
        at: factor * weight for at, weight in enumerate(weights)
    }
    assert [shares.count(at, step) for at in range(len(weights))] == [factor * each for each in weights]


@given(WEIGHTS, st.integers(1, 9))
def test_each_environment_walks_through_its_problems_one_after_another(
    weights: tuple[int, ...], groups_per_step: int
) -> None:
    shares = GroupShares(weights, groups_per_step)
    met: Counter[int] = Counter()
    for group in group_numbers([shares.plan(step) for step in range(30)]):
        environment = shares.environment(group)
        assert shares.problem(group) == met[environment]
        met[environment] += 1


@given(WEIGHTS, st.integers(1, 5), st.integers(1, 3), st.data())
def test_refills_are_of_the_environment_that_they_replace_and_have_problems_that_no_group_has(
    weights: tuple[int, ...], groups_per_step: int, most: int, data: st.DataObject
) -> None:
    shares = GroupShares(weights, groups_per_step, most)
    groups: list[int] = []
    for step in range(6):
        ranges = [shares.plan(step)]
        for _ in range(data.draw(st.integers(0, most))):
            replaced = data.draw(st.sampled_from(group_numbers(ranges)))
            refill = shares.plan_refill(ranges, replaced)
            assert shares.environment(refill.first) == shares.environment(replaced)
            ranges.append(refill)
        groups += group_numbers(ranges)
    assert len(set(groups)) == len(groups)
    problems = [(shares.environment(group), shares.problem(group)) for group in groups]
    assert len(set(problems)) == len(problems)


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 10_000))
def test_with_one_environment_a_groups_number_is_that_of_its_problem(
    groups_per_step: int, refills: int, group: int
) -> None:
    shares = GroupShares((1,), groups_per_step, refills)
    assert (shares.environment(group), shares.problem(group)) == (0, group)


@pytest.mark.parametrize(("weights", "most"), [((2, 1, 1), [2, 1, 1]), ((1, 1, 1), [2, 2, 2])])
def test_the_largest_number_of_groups_of_a_step_is_known(weights: tuple[int, ...], most: list[int]) -> None:
    shares = GroupShares(weights, 4)
    assert [shares.most_per_step(at) for at in range(len(weights))] == most
