"""Messages of one weight sync between flow, trainer and servers: dataclasses that msgspec reads and writes as JSON.

The flow fetches the trainer's `WeightOffer` and each server's `ServerLocation`. It then sends a `WeightUpdateRequest` to
each server and the `SendTarget` of each to the trainer, concurrently. A server responds once the new weights are in place
(`WeightUpdateResponse`), the trainer once they have left (`SendResult`).
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from rollmill.tasks.errors import SyncError
from rollmill.tasks.observe.spans import Span
from rollmill.tasks.sync.transfer_plan import TransferPlan

REQUESTS_HELD = "requests stay held"
"""Part of a server's error that failed while it switched weights. After any other error it still serves the old weights."""

DEVICE_TRANSPORTS = frozenset({"nccl", "ipc"})
"""Transports by which weights arrive in the memory of the server's device, and from there in its live model."""

SHARED_TRANSPORTS = frozenset({"tcp", "files"})
"""Transports by which one worker of a server receives the weights for all of them, into memory that they share."""

CHANGES_TRANSPORTS = frozenset({"tcp", "nccl", "files"})
"""Transports by which ranks can send changes: by shm nothing travels, and ipc copies within a GPU."""

ProgressCallback = Callable[[Mapping[str, int]], None]
"""Receives the number of bytes sent to each server so far, by its address."""

FIRST_RANK, WAITING_FOR_TRAINER = "trainer/0", "waiting_for_trainer"
"""In spans: the process of rank 0, which answers for all ranks, and the name of a server's wait for a rank."""


@dataclass(frozen=True)
class ProcessLocation:
    """Where a process runs (machine, device type, GPUs), on which the choice of a transport depends.

    Attributes:
        machine: equal for processes that can open each other's memory; see `machine_id`.
        device: "cpu" or "cuda".
        gpus: ids of the GPUs that hold the weights.
    """

    machine: str
    device: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerLocation(ProcessLocation):
    """Where a server runs, and how many workers it has.

    Attributes:
        workers: number of its worker processes.
    """

    workers: int = 1


@dataclass(frozen=True)
class AdapterBase:
    """The start model that low-rank adapters are added to.

    Attributes:
        folder: of the start model, at the same path on the trainer's and the servers' machines.
        dtype: torch's name of the type in which the trainer keeps weights.
        scale: alpha / rank.
    """

    folder: str
    dtype: str
    scale: float


@dataclass(frozen=True)
class WeightOffer:
    """Layout of the weights that the trainer can send, and where servers get them; it changes when a checkpoint is loaded.

    Attributes:
        plan: layout of the weights and who sends which bytes.
        host: address of the store through which links are opened.
        port: port of that store.
        location: of rank 0.
        base: set if the tensors are adapters; None if they are whole weights.
        shared: path of the memory from which servers on the trainer's machine read; empty if there is none.
    """

    plan: TransferPlan
    host: str
    port: int
    location: ProcessLocation
    base: AdapterBase | None = None
    shared: str = ""


@dataclass(frozen=True)
class SendTarget:
    """The route of weights to a server.

    Attributes:
        server: its address.
        transport: tcp, nccl, ipc or shm, by which the trainer sends, or files, which the server reads.
        prefix: names the links, and is their secret. They are opened at the first transfer with a prefix and kept for later ones.
        workers: worker processes of the server to which all weights are sent.
        snapshot: name of the bytes that are sent, for later transfers of their changes; empty if there will be none.
        base_snapshot: the snapshot that the server holds, of which it can receive changes; empty: it receives the whole.
    """

    server: str
    transport: str
    prefix: str
    workers: int = 1
    snapshot: str = ""
    base_snapshot: str = ""


@dataclass(frozen=True)
class SendResult:
    """The outcome of a transfer to one server.

    Attributes:
        server: its address.
        bytes: bytes sent to each of these workers, by all ranks together.
        seconds: time until the last byte was sent.
        error: why the trainer gave the server up and closed its links; empty on success.
    """

    server: str
    bytes: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class WeightUpdateRequest:
    """Body of POST /rollmill/weights: the weights that a server is to receive, and how.

    Attributes:
        version: name of the weights once they are in place.
        mode: keep or second_copy; verify compares the weights with the live model, which stays.
        transport: tcp, nccl, ipc, shm or files.
        plan: a `TransferPlan`, from `encode_plan`.
        timeout_s: seconds until all weights must be in place.
        stall_timeout_s: seconds within which some byte must arrive.
        base, host, port, shared: see `WeightOffer`.
        prefix: see `SendTarget`.
        files: for the transport files: paths, or addresses to download.
        checksums: names of the tensors whose checksums the response must have.
        snapshot, base_snapshot: see `SendTarget`. With a snapshot the server receives into host memory, and keeps it.
    """

    version: str
    mode: str
    transport: str
    # Encoded once for all servers.
    plan: bytes
    timeout_s: float
    stall_timeout_s: float
    base: AdapterBase | None = None
    host: str = ""
    port: int = 0
    prefix: str = ""
    shared: str = ""
    files: tuple[str, ...] = ()
    checksums: tuple[str, ...] = ()
    snapshot: str = ""
    base_snapshot: str = ""

    @property
    def arrives_on_device(self) -> bool:
        """Whether the weights arrive in the memory of the server's device, which then keeps none of them elsewhere."""
        return self.transport in DEVICE_TRANSPORTS and not self.snapshot

    def decode_plan(self) -> TransferPlan:
        """Decode the transfer plan.

        Raises:
            SyncError: it is no plan of this version.
        """
        return _decode_plan(self.plan)


@dataclass(frozen=True)
class WeightUpdateResponse:
    """A server's response once new weights are in place, or compared.

    Attributes:
        bytes: bytes received by each worker.
        received_s: seconds until the last byte had arrived.
        held_s: seconds for which requests were held.
        checksums: SHA-256 (64 hex digits) of the requested tensors as they arrived.
        differing: layers of the live model that differ from these weights; after mode verify: modules that differ from those
            of a second model with these weights.
        uncompared: layers of the live model whose weights cannot be read for this comparison.
        spans: timed intervals of the server's work; their field `process` is empty.
        snapshot: name of the snapshot that the server holds now; empty if it keeps none.
    """

    bytes: int
    received_s: float
    held_s: float
    checksums: Mapping[str, str] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    snapshot: str = ""


def encode_plan(plan: TransferPlan) -> bytes:
    """Encode a transfer plan for `WeightUpdateRequest.plan`: compressed MessagePack, a few bytes a tensor."""
    return zlib.compress(msgspec.msgpack.encode(plan))


# The plan is the same at every sync, until the trainer starts again.
@lru_cache(maxsize=1)
def _decode_plan(encoded: bytes) -> TransferPlan:
    try:
        return msgspec.msgpack.decode(zlib.decompress(encoded), type=TransferPlan)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise SyncError(
            f"cannot read the transfer plan: {error}; trainer and server need the same version"
        ) from error
