"""Which transport a server gets: a table of places."""

import pytest

from tasks.sync.choice import choose
from tasks.sync.order import Place, ServerPlace

CPU = Place("m1", "cpu")
GPU = Place("m1", "cuda", ("g0", "g1"))
UNKNOWN_GPU = Place("m1", "cuda")


def server(place: Place, **changes: object) -> ServerPlace:
    return ServerPlace(**(place.to_json() | changes))


@pytest.mark.parametrize(
    ("trainer", "served", "shares", "expected"),
    [
        (CPU, server(CPU), True, "shm"),
        (CPU, server(CPU), False, "tcp"),
        (CPU, server(CPU, machine="m2"), True, "tcp"),
        (GPU, server(GPU, gpus=("g2",)), True, "nccl"),
        (GPU, server(GPU, gpus=("g1", "g2")), True, "shm"),
        (GPU, server(GPU, gpus=("g1",)), False, "tcp"),
        (GPU, server(GPU, machine="m2", gpus=("g7",)), True, "nccl"),
        (GPU, server(CPU), True, "shm"),
        (CPU, server(GPU), True, "shm"),
        (GPU, server(CPU, machine="m2"), True, "tcp"),
        (UNKNOWN_GPU, server(UNKNOWN_GPU), True, "shm"),
        (UNKNOWN_GPU, server(UNKNOWN_GPU, machine="m2"), True, "nccl"),
    ],
)
def test_auto_takes_the_fastest_way_that_is_possible(
    trainer: Place, served: ServerPlace, shares: bool, expected: str
) -> None:
    choice = choose("auto", trainer, served, shares_memory=shares)
    assert choice.transport == expected
    assert choice.reason


@pytest.mark.parametrize("setting", ["tcp", "gloo", "files"])
def test_what_goes_everywhere_is_taken_as_set(setting: str) -> None:
    assert choose(setting, GPU, server(CPU, machine="m2"), shares_memory=False).transport == setting


@pytest.mark.parametrize(
    ("setting", "trainer", "served", "shares", "why"),
    [
        ("nccl", CPU, server(GPU), True, "the trainer is on cpu"),
        ("nccl", GPU, server(CPU), True, "the server is on cpu"),
        ("nccl", GPU, server(GPU, gpus=("g1",)), True, r"the same GPUs \(g1\)"),
        ("shm", CPU, server(CPU, machine="m2"), True, "different machines"),
        ("shm", CPU, server(CPU), False, "no shared memory"),
    ],
)
def test_what_is_set_and_impossible_says_why_and_what_to_do(
    setting: str, trainer: Place, served: ServerPlace, shares: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*; give tcp, or auto"):
        choose(setting, trainer, served, shares_memory=shares)
