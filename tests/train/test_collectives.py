"""When a rank came to a collective and left it, and who waited for whom."""

import time

import numpy as np
import pytest
import torch

from rollmill.tasks.train.collectives import CollectiveTimes, clock_shifts, find_waits

MS = 1_000_000


class SlowGradient(torch.autograd.Function):
    """Identity whose backward pass takes 20 ms."""

    @staticmethod
    def forward(_: object, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(_: object, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient


def waits_in(visits: list[np.ndarray]) -> list[list[tuple[int, int, int]]]:
    """Begin, end and slowest rank of each rank's waits."""
    return [list(zip(*(each.tolist() for each in waits), strict=True)) for waits in find_waits(visits)]


def test_the_first_rank_at_a_collective_waits_for_the_last() -> None:
    visits = [np.array([[1, 4], [9, 10]]) * MS, np.array([[3, 4], [5, 10]]) * MS]
    assert waits_in(visits) == [[(1 * MS, 3 * MS, 1)], [(5 * MS, 9 * MS, 0)]]


def test_a_rank_that_leaves_before_the_last_one_arrives_waits_until_it_leaves() -> None:
    visits = [np.array([[1, 2]]) * MS, np.array([[5, 6]]) * MS]
    assert waits_in(visits) == [[(1 * MS, 2 * MS, 1)], []]


def test_clocks_of_other_machines_are_shifted_by_when_ranks_left_together() -> None:
    visits = [np.array([[1, 4], [5, 9]]), np.array([[101, 104], [107, 109]])]
    assert clock_shifts(visits, ["a", "b"]) == [0, -100]
    assert clock_shifts(visits, ["a", "a"]) == [0, 0]


def test_a_reduction_is_timed_from_the_last_gradient_of_the_backward_pass() -> None:
    times, weight = CollectiveTimes(), torch.nn.Parameter(torch.ones(2))
    times.watch_gradients([weight])
    times.begin()
    loss = SlowGradient.apply(weight).sum()
    started = time.perf_counter_ns()
    with times.reduction():
        loss.backward()
        reduced = time.perf_counter_ns()
        time.sleep(0.02)
    ((came, left),) = times.visits(lambda at: at)
    assert started + 20 * MS <= came <= reduced
    assert left >= reduced + 20 * MS


@pytest.mark.parametrize("n_calls", [0, 3])
def test_every_collective_is_one_visit(n_calls: int) -> None:
    times = CollectiveTimes()
    times.begin()
    for _ in range(n_calls):
        with times.collective():
            pass
    assert times.visits(lambda at: at).shape == (n_calls, 2)
