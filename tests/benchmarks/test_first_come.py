import math
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules.first_come import (
    by_group,
    by_trajectory,
    group_bound_s,
    serve,
    trajectory_bound_s,
)
from benchmarks.schedules.latencies import ROLLOUT_SLOTS, SCORING_SLOTS, Latencies, draw
from benchmarks.schedules.timeline import Interval

pieces = st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 50)), min_size=1, max_size=30)


def test_work_is_served_in_order_of_arrival_and_ties_by_number() -> None:
    assert serve([0, 0, 0], [3, 1, 1], 2) == [(0, 3), (0, 1), (1, 2)]
    assert serve([2, 0], [1, 5], 1) == [(5, 6), (0, 5)]


def test_a_free_slot_waits_for_work_that_has_not_arrived() -> None:
    assert serve([0, 4], [1, 1], 2) == [(0, 1), (4, 5)]


@given(pieces, st.integers(1, 6))
def test_no_more_work_than_slots_at_any_moment_and_no_slot_is_idle_while_work_waits(
    work: list[tuple[float, float]], n_slots: int
) -> None:
    arrivals, durations = zip(*work, strict=True)
    served = serve(arrivals, durations, n_slots)
    for arrival, duration, (start, end) in zip(arrivals, durations, served, strict=True):
        busy = sum(other.start_s <= start < other.end_s for other in served)
        assert start >= arrival
        assert end == start + duration
        assert busy <= n_slots
        if start > arrival:
            just_before = math.nextafter(start, 0.0)
            assert sum(other.start_s <= just_before < other.end_s for other in served) == n_slots
    for (earlier, one), (later, two) in combinations(zip(arrivals, served, strict=True), 2):
        if earlier < later:
            assert one.start_s <= two.start_s


def test_a_trajectory_is_scored_after_its_own_rollout_and_a_group_after_its_last() -> None:
    work = Latencies(((1.0, 4.0),), (2.0,))
    assert by_trajectory(work).scores == [Interval(1, 2), Interval(4, 5)]
    assert by_group(work).scores == [Interval(4, 6)]


def test_the_bound_is_the_busiest_slots_or_the_longest_chain() -> None:
    one_chain = Latencies(((1.0, 40.0),), (2.0,))
    assert trajectory_bound_s(one_chain) == 41.0
    assert group_bound_s(one_chain) == 42.0
    many_rollouts = Latencies(((1.0,) * 80,), (0.8,))
    assert trajectory_bound_s(many_rollouts) == 80 / ROLLOUT_SLOTS
    many_scores = Latencies(((0.1,),) * 80, (1.0,) * 80)
    assert group_bound_s(many_scores) == 80 / SCORING_SLOTS


def test_the_drawn_work_is_that_of_the_published_schedules() -> None:
    """1.093 by trajectory and 1.254 by group, to the lower bound, in the mean of seeds 0 to 4."""
    drawn = [draw(seed, 1.0) for seed in range(5)]
    assert statistics.mean(
        by_trajectory(each).makespan_s / trajectory_bound_s(each) for each in drawn
    ) == pytest.approx(1.093, abs=5e-4)
    assert statistics.mean(
        by_group(each).makespan_s / group_bound_s(each) for each in drawn
    ) == pytest.approx(1.254, abs=5e-4)


def test_shares_count_the_slots_time_until_the_end() -> None:
    timeline = by_group(Latencies(((1.0, 4.0),), (2.0,)))
    assert timeline.makespan_s == 6.0
    assert timeline.first_score_s == 6.0
    assert timeline.rollout_share(2) == 5 / 12
    assert timeline.scoring_share(1) == 2 / 6
