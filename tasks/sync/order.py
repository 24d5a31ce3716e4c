"""What flow, trainer and servers tell each other about one sync; imports nothing but the standard library's.

The flow asks the trainer for its `WeightOffer` and a server for its `ServerPlace`, then gives the server a `WeightOrder`
and the trainer a `Target` at the same time. The server answers when the weights are in place (`WeightAnswer`), the trainer
when they are gone (`Sent`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

REQUESTS_HELD = "requests stay held"
"""What a server's error says when it failed while new weights were put in place; after any other the old ones serve."""

FIRST_RANK, WAITING_FOR_TRAINER = "trainer/0", "waiting_for_trainer"
"""In spans: the process of rank 0, which answers for all ranks, and a server's wait for a rank, which is its cause."""


@dataclass(frozen=True)
class _Message:
    """JSON of a dataclass."""

    def to_json(self) -> dict[str, Any]:
        """Its fields; none is a dataclass."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        return cls(**values)


@dataclass(frozen=True)
class Place(_Message):
    """Where a process runs, as far as a choice of the transport goes by it.

    Attributes:
        machine: equal for processes that see each other's memory: the boot's id and the namespace of processes.
        device: "cpu" or "cuda".
        gpus: ids of the GPUs that the weights are on.
    """

    machine: str
    device: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerPlace(Place):
    """A server's.

    Attributes:
        workers: processes of it that each take all weights.
    """

    workers: int = 1


@dataclass(frozen=True)
class WeightOffer(_Message):
    """What the trainer has to give; the same until it loads again.

    Attributes:
        plan: a TransferPlan as JSON.
        host: where links are opened, a store's address.
        port: the store's.
        place: of the trainer's rank 0, as JSON.
        base: an AdapterBase as JSON when the tensors are adapters; None when they are whole weights.
        shared: path of the memory that servers on this machine read the stream from; empty when there is none.
    """

    plan: Mapping[str, Any]
    host: str
    port: int
    place: Mapping[str, Any]
    base: Mapping[str, Any] | None = None
    shared: str = ""


@dataclass(frozen=True)
class Target(_Message):
    """A server, as the trainer is told of it.

    Attributes:
        server: its address, its name here.
        transport: tcp, gloo, nccl or shm.
        prefix: links are opened under it at the first transfer, and kept for later ones with the same prefix.
        workers: processes of it that each take all weights.
    """

    server: str
    transport: str
    prefix: str
    workers: int = 1


@dataclass(frozen=True)
class Sent(_Message):
    """What became of a transfer to one server.

    Attributes:
        bytes: to each of its workers, by all ranks together.
        seconds: until the last byte had left.
        error: why it was given up, and its links dropped; empty when all went.
    """

    server: str
    bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class WeightOrder(_Message):
    """What a server is to do: POST /rollmill/weights.

    Attributes:
        version: name of the weights once they are in place.
        mode: keep, second_copy; or verify: compare them with the live ones, which stay.
        transport: tcp, gloo, nccl, shm or files.
        plan, base, host, port, shared: see WeightOffer.
        prefix: see Target.
        files: for the transport files: paths, or addresses to read by HTTP.
        checksums: names of tensors whose checksums are asked for.
        timeout_s: seconds until all must be in place.
        stall_timeout_s: seconds in which something must arrive.
    """

    version: str
    mode: str
    transport: str
    plan: Mapping[str, Any]
    timeout_s: float
    stall_timeout_s: float
    base: Mapping[str, Any] | None = None
    host: str = ""
    port: int = 0
    prefix: str = ""
    shared: str = ""
    files: tuple[str, ...] = ()
    checksums: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightAnswer(_Message):
    """What a server says when new weights are in place, or compared.

    Attributes:
        bytes: that arrived at each worker.
        received_s: seconds until the last byte was there.
        held_s: seconds that requests were held.
        checksums: SHA-256 of the tensors asked for, as they arrived, 64 hex digits.
        differing: of mode verify: what the live model has otherwise than a model with these weights.
        spans: what the server did for it: the fields of a Span each, whose process is empty.
    """

    bytes: int
    received_s: float
    held_s: float
    checksums: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    spans: tuple[tuple[Any, ...], ...] = ()
