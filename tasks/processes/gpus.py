"""Which GPUs each process of a run sees: a pure function of the visible GPUs and of what the processes need."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.tasks.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees: numbers or UUIDs, in the order in which it numbers them."""


@dataclass(frozen=True, slots=True)
class GpuAssignment:
    """Values of CUDA_VISIBLE_DEVICES for the launched processes; empty: the process sees what this one sees.

    Attributes:
        trainer: for the trainer, whose rank i uses the i-th of them.
        servers: for each vLLM server.
    """

    trainer: str
    servers: tuple[str, ...]


def list_visible_gpus(base: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """List the GPUs that this process sees, as entries of CUDA_VISIBLE_DEVICES; empty without a GPU.

    Slurm and Kubernetes set the variable. Where it is not set, all GPUs of the machine are visible, numbered from 0.

    Raises:
        ConfigError: there is a GPU, and its driver does not answer.
    """
    if VISIBLE in base:
        # CUDA ignores what follows an invalid entry, by which -1 hides all GPUs.
        names = [each.strip() for each in base[VISIBLE].split(",")]
        end = next((i for i, each in enumerate(names) if not each or each.startswith("-")), len(names))
        return tuple(names[:end])
    return tuple(each.number for each in read_gpus(base))


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU of this machine, as its driver reports it.

    Attributes:
        number: its number on the machine.
        uuid: its id.
        name: of the product.
        total_bytes: its memory.
        used_bytes: in use by any process.
        driver: version of NVIDIA's driver.
    """

    number: str
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    driver: str


_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version"
_MIB = 1 << 20


def read_gpus(base: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[GpuState, ...]:
    """Read the GPUs of this machine from nvidia-smi; empty without a GPU.

    Args:
        base: environment; an empty CUDA_VISIBLE_DEVICES hides all GPUs.
        devices: folder with the device files of GPUs.

    Raises:
        ConfigError: there are device files of GPUs, and nvidia-smi does not report them.
    """
    if base.get(VISIBLE) == "":
        return ()
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    rows = [[each.strip() for each in line.split(",")] for line in output.splitlines()]
    # Without a device, or with a broken driver, it prints a sentence in place of the table.
    rows = [row for row in rows if len(row) == len(_FIELDS.split(",")) and row[3].isdecimal()]
    if not rows and any(devices.glob("nvidia[0-9]*")):
        remedy = f"there is a GPU, and its driver does not answer: reload it, or hide the GPU with {VISIBLE}= to compute on the CPU"
        raise ConfigError("nvidia-smi", output.strip()[:200], remedy)
    return tuple(
        GpuState(number, uuid, name, int(total) * _MIB, int(used) * _MIB if used.isdecimal() else 0, driver)
        for number, uuid, name, total, used, driver in rows
    )


def assign_gpus(
    visible: Sequence[str],
    *,
    ranks: int,
    servers: int,
    per_server: int,
    train_gpus: Sequence[str] = (),
    serve_gpus: Sequence[str] = (),
    shares: bool = False,
) -> GpuAssignment:
    """Assign GPUs to the trainer's ranks and to vLLM servers, in the order in which they are visible, ranks first.

    A GPU is named by its position among the visible ones, or by its entry there. Without a visible GPU nothing is assigned, except
    what is named.

    Example: of the visible 4,5,6,7 two ranks get "4,5" and two servers "6" and "7".

    Args:
        visible: GPUs, as entries of CUDA_VISIBLE_DEVICES.
        ranks: number of the trainer's ranks on this machine; 0: no trainer is launched.
        servers: number of vLLM servers; 0: none is launched.
        per_server: GPUs that a server computes with (tensor times pipeline parallelism).
        train_gpus: names of the ranks' GPUs, as many as ranks; empty: the first visible ones.
        serve_gpus: names of the servers' GPUs, in equal parts for each; empty: the next visible ones.
        shares: True if servers may compute on GPUs of the trainer.

    Raises:
        ConfigError: there are too few GPUs, one is not visible or named twice, or servers would share those of the trainer.
    """
    trainer = _pick("train.gpus", train_gpus, visible) if ranks else ()
    serving = _pick("serve.gpus", serve_gpus, visible) if servers else ()
    if train_gpus and ranks and len(trainer) != ranks:
        raise ConfigError("train.gpus", list(train_gpus), f"name one GPU for each of the {ranks} ranks")
    if serve_gpus and servers and (len(serving) % servers or len(serving) < servers * per_server):
        remedy = f"name {per_server} GPUs or a multiple for each of the {servers} servers"
        raise ConfigError("serve.gpus", list(serve_gpus), remedy)
    if visible and ranks and not trainer:
        others = [each for each in visible if shares or each not in serving]
        trainer = _take("train.ranks", ranks, others, ranks)
    if visible and servers and not serving:
        others = [each for each in visible if shares or each not in trainer]
        serving = _take("serve.servers", servers, others, servers * per_server)
    if not shares and (both := [each for each in serving if each in trainer]):
        remedy = f"the trainer computes on {', '.join(both)} too: name other GPUs, or let both share them with serve.share_gpus=true"
        raise ConfigError("serve.gpus", list(serve_gpus), remedy)
    size = len(serving) // servers if servers else 0
    shares_of = (serving[i * size : (i + 1) * size] for i in range(servers))
    return GpuAssignment(",".join(trainer), tuple(map(",".join, shares_of)))


def _pick(field: str, names: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of `visible` that names mean; the names themselves where no GPU is known."""
    picked = []
    for name in names:
        is_position = name.isdecimal() and int(name) < len(visible)
        if visible and not is_position and name not in visible:
            remedy = (
                f"{name} is not visible: name GPUs from 0 to {len(visible) - 1}, or of {', '.join(visible)}"
            )
            raise ConfigError(field, list(names), remedy)
        picked.append(visible[int(name)] if is_position else name)
    if len(set(picked)) < len(picked):
        raise ConfigError(field, list(names), "name each GPU once")
    return tuple(picked)


def _take(field: str, value: int, others: Sequence[str], n: int) -> tuple[str, ...]:
    if len(others) < n:
        remedy = (
            f"needs {n} GPUs, and {len(others)} are free: lower it, make more visible ({VISIBLE}), or let servers and trainer "
            "share GPUs with serve.share_gpus=true"
        )
        raise ConfigError(field, value, remedy)
    return tuple(others[:n])
