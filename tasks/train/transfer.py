"""A rank's side of the weight sync: what it has to give, and the sender of its part."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tasks.errors import SyncError
from tasks.observe.spans import span
from tasks.store.weights import remove_weights
from tasks.sync.buckets import TransferPlan, plan_transfer
from tasks.sync.link import join_store, serve_store
from tasks.sync.order import Place, Sent, Target, WeightOffer
from tasks.sync.place import this_machine
from tasks.sync.sender import WeightSender
from tasks.sync.shared_memory import SharedMemory, open_shared
from tasks.train.checkpoint_form import adapter_layers, weight_layers
from tasks.train.digests import digest_of
from tasks.train.engine import Engine
from tasks.train.every_rank import of_every_rank
from tasks.train.protocol import ServiceConfig
from tasks.train.send_progress import SendProgress
from tasks.train.weight_files import write_part
from tasks.train.weight_stream import WeightStream
from tasks.train.weights import adapter_base

T = TypeVar("T")

_BY_MEMORY = ("auto", "shm")
"""Settings of sync.transport with which servers may read the trainer's memory."""

_REMEDY = "set sync.host to an address of the first rank's machine that all ranks and servers reach"


class Transfer:
    """Gives away the weights of an engine; every rank has one.

    Args:
        config: settings of the service.
        rank: this rank.
        world_size: ranks.
    """

    def __init__(self, config: ServiceConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._stream: WeightStream | None = None
        self._plan = TransferPlan((), 0, ())
        self._base: dict[str, Any] | None = None
        self._store: Any = None
        self._port = 0
        self._memory: SharedMemory | None = None
        self._shared = ""
        self._place = Place("", "")
        self._sender: WeightSender | None = None
        self._progress: SendProgress | None = None

    def prepare(self, engine: Engine) -> None:
        """Plan the transfer of a model that was just loaded; a collective.

        Raises:
            SyncError: adapters are to travel alone, and the start model's folder has not what they are added to;
                sync.host is no address of rank 0's machine.
        """
        layers = (adapter_layers if self._sends_adapters else weight_layers)(engine.model)
        self._base = asdict(adapter_base(engine.model)) if self._sends_adapters else None
        stream = WeightStream(engine.model, layers, self._rank, self._world_size)
        self._plan = plan_transfer(
            stream.tensors, stream.shares, self._config.sync.bucket_bytes, self._config.sync.streams
        )
        self._stream = stream
        self._meet(engine.model.device)

    def offer(self) -> WeightOffer:
        """What this trainer has to give; asked on rank 0.

        Raises:
            SyncError: nothing is loaded.
        """
        self._loaded  # noqa: B018 - raises
        return WeightOffer(
            plan=self._plan.to_json(),
            host=self._config.sync.host,
            port=self._port,
            place=self._place.to_json(),
            base=self._base,
            shared=self._shared,
        )

    def send(self, engine: Engine, targets: Sequence[Target]) -> list[Sent]:
        """Send every weight, or adapters alone; a collective. What became of each target counts on rank 0.

        Raises:
            SyncError: a rank could not send; on rank 0 alone.
        """
        pieces = self._loaded.pieces(engine.model)

        def send() -> list[Sent]:
            try:
                sender, progress = self._joined()
                with progress.telling(sender.progress):
                    shared = self._shared_stream() if _has_shared(targets) else None
                    return sender.send(self._plan, targets, pieces, shared)
            finally:
                _drain(pieces)

        with span("sending"):
            sent = self._of_every_rank(send)
        return [_of_all_ranks(each) for each in zip(*sent, strict=True)]

    def progress(self) -> dict[str, int]:
        """Bytes that have gone to each server of the transfer that is under way, by all ranks; asked on rank 0."""
        return self._progress.total() if self._progress else {}

    def write(self, engine: Engine, place: str, name: str) -> list[str]:
        """Write what would be sent into files; a collective, whose result, where they are, counts on rank 0.

        Raises:
            SyncError: they could not be written; on rank 0 alone.
        """
        stream = self._loaded
        weights = stream.whole(engine.model, stream.owners({each.name for each in stream.tensors}))

        def write() -> str:
            try:
                return write_part(weights, place, name, self._rank, self._world_size)
            finally:
                _drain(weights)

        files = self._of_every_rank(write)
        if self._rank == 0:
            remove_weights(place, but=name)
        return files

    def digests(self, engine: Engine, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of tensors as they are sent, 64 hex digits, by name; a collective, whose result counts on rank 0.

        Raises:
            SyncError: there is no such tensor.
        """
        stream = self._loaded
        known = {each.name for each in stream.tensors}
        if missing := set(names) - known:
            raise SyncError(
                f"the trainer sends no {', '.join(sorted(missing))}; names are those of the offer"
            )
        weights = stream.whole(engine.model, stream.owners(names or known))
        every = self._of_every_rank(lambda: {name: digest_of(each) for name, each in weights})
        return {name: digest for each in every for name, digest in each.items()}

    @property
    def _loaded(self) -> WeightStream:
        if self._stream is None:
            raise SyncError("the trainer has nothing loaded, so it has no weights")
        return self._stream

    def _of_every_rank(self, work: Callable[[], T]) -> list[T]:
        return of_every_rank(work, self._rank, self._world_size)

    def _meet(self, device: torch.device) -> None:
        """Open store and shared memory, unless they are open, and tell every rank where they and all ranks are."""
        sync, size = self._config.sync, self._plan.total_bytes
        failure = self._serve()
        if self._memory and len(self._memory.stream) != size:
            self._memory.close()
            self._memory = None
        if self._rank == 0 and sync.transport in _BY_MEMORY and self._memory is None:
            self._memory = SharedMemory(size)
        own = self._port, this_machine(), _gpu(device), self._memory.path if self._memory else "", failure
        every: list[tuple[int, str, str, str, str]] = [own] * self._world_size
        if self._world_size > 1:
            dist.all_gather_object(every, own)
        ports, machines, gpus, paths, failures = zip(*every, strict=True)
        if failures[0]:
            raise SyncError(failures[0])
        self._port, self._shared = ports[0], paths[0] if len(set(machines)) == 1 else ""
        self._place = Place(machines[0], device.type, tuple(sorted(filter(None, set(gpus)))))

    def _serve(self) -> str:
        """Open the store on rank 0, unless it is open; why it cannot be, which all ranks are to hear, or nothing."""
        sync = self._config.sync
        if self._rank == 0 and self._store is None:
            try:
                self._store = serve_store(sync.host, sync.timeout_s)
            except (RuntimeError, OSError) as error:
                return f"cannot listen at sync.host={sync.host!r}: {error}; {_REMEDY}"
            self._port = self._store.port
        return ""

    def _shared_stream(self) -> torch.Tensor | None:
        """[total_bytes] uint8 that all ranks write and servers read; None when they do not share a memory."""
        if self._memory or not self._shared:
            return self._memory.stream if self._memory else None
        return open_shared(self._shared, self._plan.total_bytes, is_writable=True)

    def _joined(self) -> tuple[WeightSender, SendProgress]:
        """This rank's sender, and how it tells how far it is; SyncError when the store is out of this rank's reach."""
        sync = self._config.sync
        if self._sender is None or self._progress is None:
            try:
                store = join_store(sync.host, self._port, sync.timeout_s)
                self._sender = WeightSender(
                    self._rank,
                    sync.host,
                    self._port,
                    timeout_s=sync.timeout_s,
                    stall_timeout_s=sync.stall_timeout_s,
                    straggler_s=sync.straggler_s,
                )
            except (RuntimeError, OSError) as error:
                raise SyncError(f"cannot reach {sync.host}:{self._port}: {error}; {_REMEDY}") from error
            self._progress = SendProgress(store, self._rank, self._world_size, sync.report_s)
        return self._sender, self._progress

    @property
    def _sends_adapters(self) -> bool:
        lora = self._config.train.lora
        return lora.rank > 0 and lora.send == "adapters"


def _of_all_ranks(sent: Sequence[Sent]) -> Sent:
    """What became of a target for which ranks sent their parts."""
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(sent) if each.error]
    n_bytes, seconds = sum(each.bytes for each in sent), max(each.seconds for each in sent)
    return Sent(sent[0].server, n_bytes, seconds, errors[0] if errors else "")


def _has_shared(targets: Sequence[Target]) -> bool:
    return any(each.transport == "shm" for each in targets)


def _gpu(device: torch.device) -> str:
    """The id of a GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _drain(rest: Iterable[object]) -> None:
    """Go on to the end, so that ranks that gather with us do not wait."""
    for _ in rest:
        pass
