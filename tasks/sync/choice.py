"""Which way weights take to a server: chosen by where trainer and server run."""

from typing import NamedTuple

from tasks.sync.order import Place, ServerPlace

CUDA = "cuda"


class Choice(NamedTuple):
    """A transport, and why it is that one."""

    transport: str
    reason: str


def choose(setting: str, trainer: Place, server: ServerPlace, *, shares_memory: bool) -> Choice:
    """The transport of a server, as set or the fastest that is possible.

    Args:
        setting: sync.transport.
        trainer: of its rank 0.
        server: where it runs.
        shares_memory: True when the trainer's weights can be read from its machine's memory.

    Raises:
        ValueError: the transport that is set is impossible there; says why, and what to do.
    """
    if setting != "auto":
        if obstacle := _obstacle(setting, trainer, server, shares_memory):
            raise ValueError(f"{obstacle}; give tcp, or auto")
        return Choice(setting, "sync.transport says so")
    if not _obstacle("nccl", trainer, server, shares_memory):
        return Choice("nccl", "trainer and server are on different GPUs")
    if not (obstacle := _obstacle("shm", trainer, server, shares_memory)):
        return Choice("shm", "trainer and server are on one machine")
    return Choice("tcp", obstacle)


def _obstacle(transport: str, trainer: Place, server: ServerPlace, shares_memory: bool) -> str:
    """Why a transport is impossible between these two; empty when it is not."""
    is_one_machine = trainer.machine == server.machine
    if transport == "nccl":
        for who, place in (("trainer", trainer), ("server", server)):
            if place.device != CUDA:
                return f"the {who} is on {place.device}, and nccl is between GPUs"
        shared = set(trainer.gpus) & set(server.gpus)
        if shared or (is_one_machine and not (trainer.gpus and server.gpus)):
            which = ", ".join(sorted(shared)) or "that are not known"
            return f"trainer and server are on the same GPUs ({which}), and nccl is between different ones"
    if transport == "shm":
        if not is_one_machine:
            return "trainer and server are on different machines, or in different containers of one"
        if not shares_memory:
            return "the trainer offers no shared memory"
    return ""
