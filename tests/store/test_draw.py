from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.store.group_draw import StoredGroup, draw_groups, steps_per_pass

GROUPS = [StoredGroup("runs/a", step, group) for step in range(4) for group in range(6)]


@given(
    groups=st.lists(st.sampled_from(GROUPS), min_size=1, unique=True),
    seed=st.integers(0, 9),
    groups_per_step=st.integers(1, 9),
    number=st.integers(0, 3),
)
def test_no_group_is_drawn_twice_in_a_pass_and_fewer_than_a_step_remain(
    groups: list[StoredGroup], seed: int, groups_per_step: int, number: int
) -> None:
    n_steps = steps_per_pass(len(groups), groups_per_step)
    steps = range(number * n_steps, (number + 1) * n_steps)
    found = [
        each
        for step in steps
        for each in draw_groups(groups, seed=seed, step=step, groups_per_step=groups_per_step)
    ]

    assert len(set(found)) == len(found)
    assert set(found) <= set(groups)
    assert len(groups) - len(found) < groups_per_step


@given(order=st.permutations(GROUPS), step=st.integers(0, 50))
def test_a_draw_depends_on_seed_and_step_alone(order: list[StoredGroup], step: int) -> None:
    ours = draw_groups(order, seed=3, step=step, groups_per_step=5)

    assert ours == draw_groups(GROUPS, seed=3, step=step, groups_per_step=5)


@given(places=st.permutations(range(len(GROUPS))), step=st.integers(0, 9))
def test_by_place_each_pass_has_the_same_order(places: list[int], step: int) -> None:
    placed = [replace(each, place=place) for each, place in zip(GROUPS, places, strict=True)]
    drawn = draw_groups(placed, seed=0, step=step, groups_per_step=6, order="place")

    first = step % 4 * 6
    assert [each.place for each in drawn] == list(range(first, first + 6))


def test_by_weight_groups_are_drawn_in_proportion_and_once_a_step() -> None:
    weighed = [replace(each, weight=1.0 + 3.0 * (each.step == 3)) for each in GROUPS]
    n_steps = 20_000
    firsts: Counter[int] = Counter()
    for step in range(n_steps):
        drawn = draw_groups(weighed, seed=1, step=step, groups_per_step=5, order="weight")
        assert len(set(drawn)) == 5
        assert drawn == draw_groups(weighed[::-1], seed=1, step=step, groups_per_step=5, order="weight")
        firsts[drawn[0].step] += 1

    # 6 of 24 groups have 4 of the weights 18 + 24: 24 / 42 of the first draws, with a deviation of 0.0035.
    assert abs(firsts[3] / n_steps - 24 / 42) < 0.02
    few = draw_groups(weighed[:3], seed=1, step=0, groups_per_step=5, order="weight")
    assert set(few) == set(weighed[:3])


def test_each_pass_and_each_seed_has_a_different_order() -> None:
    first, later, other = (
        draw_groups(GROUPS, seed=seed, step=step, groups_per_step=24)
        for seed, step in ((0, 0), (0, 1), (1, 0))
    )

    assert sorted(first) == sorted(later) == sorted(other) == sorted(GROUPS)
    assert first != later
    assert first != other
