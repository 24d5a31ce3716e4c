"""Each process of a run sees the GPUs that it computes with: cases of machines and of job schedulers."""

import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import GpuAssignment, assign_gpus, list_visible_gpus

EIGHT = tuple(map(str, range(8)))
IDS = ("GPU-8a1f", "GPU-9b2e", "MIG-77c0/1/0", "GPU-0d4c")

# Visible GPUs, what is asked for, and the trainer's and the servers' CUDA_VISIBLE_DEVICES.
ASSIGNED = {
    "no GPU": ((), {"ranks": 2, "servers": 2}, "", ("", "")),
    "one shared": (("0",), {"ranks": 1, "servers": 1, "shares": True}, "0", ("0",)),
    "4 + 4 of 8": (EIGHT, {"ranks": 4, "servers": 4}, "0,1,2,3", ("4", "5", "6", "7")),
    "1 + 1 of 8": (EIGHT, {"ranks": 1, "servers": 1}, "0", ("1",)),
    "a Slurm job": (("4", "5", "6", "7"), {"ranks": 2, "servers": 2}, "4,5", ("6", "7")),
    "UUIDs": (IDS, {"ranks": 2, "servers": 2}, "GPU-8a1f,GPU-9b2e", ("MIG-77c0/1/0", "GPU-0d4c")),
    "tensor parallel": (EIGHT, {"ranks": 4, "servers": 2, "per_server": 2}, "0,1,2,3", ("4,5", "6,7")),
    "all shared": (
        ("0", "1"),
        {"ranks": 2, "servers": 2, "shares": True},
        "0,1",
        ("0", "1"),
    ),
    "servers alone": (EIGHT, {"ranks": 0, "servers": 2, "per_server": 4}, "", ("0,1,2,3", "4,5,6,7")),
    "a trainer alone": (EIGHT, {"ranks": 2, "servers": 0}, "0,1", ()),
    "positions in a Slurm job": (
        ("4", "5", "6", "7"),
        {"ranks": 1, "servers": 1, "train_gpus": ("3",), "serve_gpus": ("0",)},
        "7",
        ("4",),
    ),
    "servers named, ranks take the rest": (
        EIGHT,
        {"ranks": 2, "servers": 2, "serve_gpus": ("0", "1")},
        "2,3",
        ("0", "1"),
    ),
    "more GPUs than a server needs": (
        EIGHT,
        {"ranks": 1, "servers": 2, "train_gpus": ("7",), "serve_gpus": ("0", "1", "2", "3")},
        "7",
        ("0,1", "2,3"),
    ),
    "named by UUID": (
        IDS,
        {"ranks": 1, "servers": 1, "train_gpus": ("GPU-0d4c",), "serve_gpus": ("GPU-8a1f",)},
        "GPU-0d4c",
        ("GPU-8a1f",),
    ),
    "named on purpose for both": (
        EIGHT,
        {"ranks": 1, "servers": 1, "train_gpus": ("2",), "serve_gpus": ("2",), "shares": True},
        "2",
        ("2",),
    ),
    "named where none is known": (
        (),
        {"ranks": 1, "servers": 1, "train_gpus": ("0",), "serve_gpus": ("1",)},
        "0",
        ("1",),
    ),
}

REFUSED = {
    "one GPU for both": (("0",), {"ranks": 1, "servers": 1}, r"serve\.servers = 1: needs 1 GPUs, and 0 are"),
    "too few for the ranks": (("0",), {"ranks": 2, "servers": 0}, r"train\.ranks = 2: needs 2 GPUs, and 1 "),
    "too few for tensor parallelism": (
        ("0", "1"),
        {"ranks": 1, "servers": 1, "per_server": 2},
        r"serve\.servers = 1: needs 2 GPUs, and 1 are free",
    ),
    "overlap": (
        EIGHT,
        {"ranks": 2, "servers": 1, "train_gpus": ("0", "1"), "serve_gpus": ("1",)},
        r"serve\.gpus = \['1'\]: the trainer computes on 1 too",
    ),
    "the same GPU by position and by UUID": (
        IDS,
        {"ranks": 1, "servers": 1, "train_gpus": ("0",), "serve_gpus": ("GPU-8a1f",)},
        r"the trainer computes on GPU-8a1f too",
    ),
    "out of range": (
        ("4", "5"),
        {"ranks": 1, "servers": 1, "serve_gpus": ("2",)},
        r"serve\.gpus = \['2'\]: 2 is not visible: name GPUs from 0 to 1, or of 4, 5",
    ),
    "named twice": (EIGHT, {"ranks": 2, "servers": 0, "train_gpus": ("1", "1")}, "name each GPU once"),
    "a GPU too few for the ranks": (
        EIGHT,
        {"ranks": 2, "servers": 0, "train_gpus": ("1",)},
        r"name one GPU for each of the 2 ranks",
    ),
    "fewer than tensor parallelism needs": (
        EIGHT,
        {"ranks": 1, "servers": 2, "per_server": 2, "serve_gpus": ("4", "5")},
        r"name 2 GPUs or a multiple for each of the 2 servers",
    ),
}


@pytest.mark.parametrize("case", ASSIGNED)
def test_gpus_are_assigned_in_the_order_in_which_they_are_visible(case: str) -> None:
    visible, asked, trainer, servers = ASSIGNED[case]
    assert assign_gpus(visible, **{"per_server": 1} | asked) == GpuAssignment(trainer, servers)


@pytest.mark.parametrize("case", REFUSED)
def test_an_assignment_that_the_visible_gpus_do_not_allow_is_refused(case: str) -> None:
    visible, asked, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text):
        assign_gpus(visible, **{"per_server": 1} | asked)


@pytest.mark.parametrize(
    ("value", "visible"),
    [("4,5", ("4", "5")), ("GPU-1, MIG-2", ("GPU-1", "MIG-2")), ("", ()), ("-1", ()), ("0,-1,2", ("0",))],
)
def test_visible_gpus_are_those_that_cuda_would_show(value: str, visible: tuple[str, ...]) -> None:
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == visible
