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


def test_each_pass_and_each_seed_has_a_different_order() -> None:
    first, later, other = (
        draw_groups(GROUPS, seed=seed, step=step, groups_per_step=24)
        for seed, step in ((0, 0), (0, 1), (1, 0))
    )

    assert sorted(first) == sorted(later) == sorted(other) == sorted(GROUPS)
    assert first != later
    assert first != other
