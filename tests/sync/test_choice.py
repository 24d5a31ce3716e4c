"""Which transport a server gets: a table of places."""

from dataclasses import asdict

import pytest

from rollmill.tasks.sync.broadcast import choose_transport
from rollmill.tasks.sync.weight_messages import ProcessLocation, ServerLocation

CPU = ProcessLocation("m1", "cpu")
GPU = ProcessLocation("m1", "cuda", ("g0", "g1"))
ONE_GPU = ProcessLocation("m1", "cuda", ("g0",))
UNKNOWN_GPU = ProcessLocation("m1", "cuda")


def server(place: ProcessLocation, **changes: object) -> ServerLocation:
    return ServerLocation(**(asdict(place) | changes))


@pytest.mark.parametrize(
    ("trainer", "served", "shares", "expected"),
    [
        (CPU, server(CPU), True, "shm"),
        (CPU, server(CPU), False, "tcp"),
        (CPU, server(CPU, machine="m2"), True, "tcp"),
        (GPU, server(GPU, gpus=("g2",)), True, "nccl"),
        (GPU, server(GPU, gpus=("g1", "g2")), True, "shm"),
        (ONE_GPU, server(ONE_GPU), True, "ipc"),
        (ONE_GPU, server(ONE_GPU, machine="m2"), True, "tcp"),
        (ONE_GPU, server(GPU), True, "shm"),
        (GPU, server(GPU), True, "shm"),
        (GPU, server(GPU, gpus=("g1",)), False, "tcp"),
        (GPU, server(GPU, machine="m2", gpus=("g7",)), True, "nccl"),
        (GPU, server(CPU), True, "shm"),
        (CPU, server(GPU), True, "shm"),
        (GPU, server(CPU, machine="m2"), True, "tcp"),
        (UNKNOWN_GPU, server(UNKNOWN_GPU), True, "shm"),
        (UNKNOWN_GPU, server(UNKNOWN_GPU, machine="m2"), True, "nccl"),
    ],
)
def test_auto_chooses_the_fastest_possible_transport(
    trainer: ProcessLocation, served: ServerLocation, shares: bool, expected: str
) -> None:
    transport, reason = choose_transport("auto", trainer, served, shares_memory=shares)
    assert transport == expected
    assert reason


@pytest.mark.parametrize(
    ("failed", "expected", "reason"),
    [
        ({"nccl"}, "tcp", "on different machines, or in different containers of one, and nccl failed before"),
        ({"tcp"}, "nccl", "trainer and server are on different GPUs"),
    ],
)
def test_auto_skips_a_failed_transport(failed: set[str], expected: str, reason: str) -> None:
    served = server(GPU, machine="m2", gpus=("g7",))
    chosen = choose_transport("auto", GPU, served, shares_memory=True, failed=failed)
    assert chosen[0] == expected
    assert chosen[1].endswith(reason)


def test_on_one_machine_shared_memory_follows_nccl_and_tcp_follows_both() -> None:
    served = server(GPU, gpus=("g2",))
    failures: list[set[str]] = [set(), {"nccl"}, {"nccl", "shm"}]
    chosen = [choose_transport("auto", GPU, served, shares_memory=True, failed=each) for each in failures]
    assert [transport for transport, _ in chosen] == ["nccl", "shm", "tcp"]
    assert chosen[2][1] == "it goes everywhere, and nccl and shm failed before"


def test_on_one_gpu_shared_memory_follows_ipc() -> None:
    chosen = choose_transport("auto", ONE_GPU, server(ONE_GPU), shares_memory=True, failed={"ipc"})
    assert chosen == ("shm", "trainer and server are on one machine, and ipc failed before")


@pytest.mark.parametrize("setting", ["tcp", "files"])
def test_a_transport_that_works_everywhere_is_used_as_set(setting: str) -> None:
    assert choose_transport(setting, GPU, server(CPU, machine="m2"), shares_memory=False)[0] == setting


@pytest.mark.parametrize(
    ("setting", "trainer", "served", "shares", "why"),
    [
        ("nccl", CPU, server(GPU), True, "the trainer is on cpu"),
        ("nccl", GPU, server(CPU), True, "the server is on cpu"),
        ("nccl", GPU, server(GPU, gpus=("g1",)), True, r"the same GPUs \(g1\)"),
        ("ipc", GPU, server(GPU, gpus=("g2",)), True, "do not share one GPU"),
        ("ipc", CPU, server(CPU), True, "do not share one GPU"),
        ("shm", CPU, server(CPU, machine="m2"), True, "different machines"),
        ("shm", CPU, server(CPU), False, "no shared memory"),
    ],
)
def test_an_impossible_transport_is_refused_with_reason_and_remedy(
    setting: str, trainer: ProcessLocation, served: ServerLocation, shares: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=rf"{why}.*; give tcp, or auto"):
        choose_transport(setting, trainer, served, shares_memory=shares)
