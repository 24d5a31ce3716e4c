"""A rank's side of the weight sync: what it offers, sends to servers and writes into files."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rollmill.tasks.errors import StoreError, SyncError
from rollmill.tasks.observe.spans import span
from rollmill.tasks.processes.machine import machine_id
from rollmill.tasks.store.checkpoints.weight_snapshots import publish_rank_weights, remove_weights
from rollmill.tasks.sync.changed_buckets import SentCopy
from rollmill.tasks.sync.links.link import join_store, report_refusal, serve_store
from rollmill.tasks.sync.links.shm_link import SharedMemory, open_shared
from rollmill.tasks.sync.links.weight_files import encode_weight_file
from rollmill.tasks.sync.transfer_plan import STREAMS, TransferPlan
from rollmill.tasks.sync.weight_messages import (
    AdapterBase,
    ProcessLocation,
    SendResult,
    SendTarget,
    WeightOffer,
)
from rollmill.tasks.sync.weight_sender import WeightSender
from rollmill.tasks.train.checkpoints.hf_export import adapter_base
from rollmill.tasks.train.checkpoints.hf_layout import adapter_layers, weight_layers
from rollmill.tasks.train.checkpoints.tensor_digests import hash_tensor
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.engine.private_torch import Store
from rollmill.tasks.train.rank_messages import all_gather_messages
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.service.ranks import gather_results
from rollmill.tasks.train.weight_stream import WeightStream

Sending = Callable[[], Mapping[str, int]]
"""Bytes sent to each server so far."""


class SendProgress:
    """Adds up the bytes that all ranks have sent in the current transfer of weights; each rank has one.

    Args:
        store: key-value store shared by the ranks, over a separate connection.
        rank: number of this rank.
        world_size: number of ranks.
        every_s: seconds between two reports of a rank.
    """

    def __init__(self, store: Store, rank: int, world_size: int, every_s: float) -> None:
        self._store, self._every_s = store, every_s
        self._keys = [f"sent/{each}" for each in range(world_size)]
        self._own = self._keys[rank]

    @contextmanager
    def report_periodically(self, sent: Sending) -> Iterator[None]:
        """Call `sent` every `every_s` seconds of the `with` block, and store its result for `total`; a thread does it.

        The end of the block removes this rank's numbers from the total.
        """
        ended = threading.Event()

        def report() -> None:
            while not ended.wait(self._every_s):
                self._store.set(self._own, json.dumps(dict(sent())))

        reporter = threading.Thread(target=report, name="send progress", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()
            # Whoever reads a removed key waits for it, and lets nobody else use the connection.
            self._store.set(self._own, "{}")

    def total(self) -> dict[str, int]:
        """Return the bytes sent to each server by all ranks, as last reported; empty before the first report."""
        total = Counter[str]()
        for key in self._keys:
            if self._store.check([key]):
                total.update(json.loads(self._store.get(key)))
        return dict(total)


_BY_MEMORY = ("auto", "shm")
"""Settings of sync.transport with which servers may read the trainer's memory."""

_REMEDY = "set sync.host to an address of the first rank's machine that all ranks and servers reach"


class _Meeting(NamedTuple):
    """What a rank sends the others when they prepare the transfer.

    Attributes:
        host: address of the store; of rank 0 alone, as are port and memory.
        port: port of the store.
        machine: id of the rank's machine.
        gpu: UUID of the rank's GPU; empty without one.
        memory: path of the shared memory; empty if there is none.
        failure: why rank 0 cannot serve the store; empty if it does.
    """

    host: str
    port: int
    machine: str
    gpu: str
    memory: str
    failure: str


class WeightTransfer:
    """Sends the weights of an engine to servers and into files; every rank has one.

    Args:
        config: settings of the trainer service.
        rank: number of this rank.
        world_size: number of ranks.
    """

    def __init__(self, config: ServiceConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._stream: WeightStream | None = None
        self._plan = TransferPlan()
        self._base: AdapterBase | None = None
        self._store: Any = None
        self._host, self._port = "", 0
        self._memory: SharedMemory | None = None
        self._shared = ""
        self._location = ProcessLocation("", "")
        self._sender: WeightSender | None = None
        self._progress: SendProgress | None = None
        self._written = SentCopy()

    def prepare(self, engine: Engine) -> None:
        """Plan the transfer of a newly loaded model's weights, and open what the ranks send them through; a collective.

        Raises:
            SyncError: adapters are to be sent alone, and the start model's folder lacks weights that they adapt; or sync.host is
                no address of rank 0's machine.
        """
        lora = self._config.train.lora
        sends_adapters = lora.rank > 0 and lora.send == "adapters"
        layers = (adapter_layers if sends_adapters else weight_layers)(engine.model)
        self._base = adapter_base(engine.model) if sends_adapters else None
        stream = WeightStream(engine.model, layers, self._rank, self._world_size)
        bucket_bytes = self._config.bucket_bytes
        self._plan = TransferPlan(stream.tensors, stream.cuts, self._world_size, bucket_bytes, STREAMS)
        self._stream = stream
        if self._sender:
            self._sender.forget_sent()
        self._written.forget()
        self._meet(engine.model.device)

    def offer(self) -> WeightOffer:
        """Plan and address of the transfer, for the flow and the servers; on rank 0 alone.

        Raises:
            SyncError: no model is loaded.
        """
        self._loaded  # noqa: B018 - raises
        return WeightOffer(
            plan=self._plan,
            host=self._host,
            port=self._port,
            location=self._location,
            base=self._base,
            shared=self._shared,
        )

    def send(self, engine: Engine, targets: Sequence[SendTarget]) -> list[SendResult]:
        """Send every weight, or the adapters alone, to servers; a collective, whose results count on rank 0.

        Raises:
            SyncError: a rank could not send; raised on rank 0 alone.
        """
        pieces = self._loaded.pieces(engine.model)

        def send() -> list[SendResult]:
            try:
                sender, progress = self._connect(engine.model.device)
                with progress.report_periodically(sender.progress):
                    uses_memory = any(each.transport == "shm" for each in targets)
                    shared = self._open_shared_stream() if uses_memory else None
                    return sender.send(self._plan, targets, pieces, shared)
            finally:
                _drain(pieces)

        with span("sending"):
            by_rank = gather_results(send, list[SendResult])
        results = []
        for sent in zip(*by_rank, strict=True):
            errors = (f"rank {rank}: {each.error}" for rank, each in enumerate(sent) if each.error)
            n_bytes, seconds = sum(each.bytes for each in sent), max(each.seconds for each in sent)
            results.append(SendResult(sent[0].server, n_bytes, seconds, next(errors, "")))
        return results

    def stop_sending(self, prefix: str) -> None:
        """Let all ranks end, within a second, the transfer to a server that refused the weights; on rank 0 alone, on any thread."""
        if self._store is not None:
            report_refusal(self._store, prefix)

    def progress(self) -> dict[str, int]:
        """Return the bytes sent to each server in the present transfer, by all ranks; on rank 0 alone."""
        return self._progress.total() if self._progress else {}

    def write(
        self, engine: Engine, place: str, name: str, snapshot: str = "", base_snapshot: str = ""
    ) -> list[str]:
        """Write all weights into files at `place`; a collective that returns the files' paths on rank 0.

        Args:
            engine: the engine with the weights.
            place: folder; older weights there are removed.
            name: name of these weights below `place`: INCARNATION-VERSION, or that with more behind another -.
            snapshot: name under which servers keep them, so that the next files can be of their changes; empty: they do not.
            base_snapshot: what the servers hold: a rank that wrote it last writes changes; empty: whole weights are written.

        Raises:
            SyncError: they could not be written; raised on rank 0 alone.
        """
        stream = self._loaded
        weights = stream.whole(engine.model, stream.owners({each.name for each in stream.tensors}))

        def write() -> str:
            try:
                # Copied, since a tensor of the stream is valid only until the next one.
                part = {tensor: each.to("cpu", copy=True) for tensor, each in weights}
                metadata: dict[str, str] = {}
                if snapshot:
                    part, metadata = encode_weight_file(
                        part, self._written, self._plan, snapshot, base_snapshot
                    )
                return publish_rank_weights(
                    place, name, self._rank, self._world_size, lambda path: _save_part(part, metadata, path)
                )
            finally:
                _drain(weights)

        files = gather_results(write, str)
        # Only now are the files of all ranks there, and servers can do without those of older versions.
        if self._rank == 0:
            remove_weights(place, but="-".join(name.split("-")[:2]))
        return files

    def digests(self, engine: Engine, names: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256, 64 hex digits, of weight tensors as they are sent, by name; a collective, empty but on rank 0.

        Args:
            engine: the engine with the weights.
            names: names of the tensors; empty: all.

        Raises:
            SyncError: there is no tensor of such a name, or no model is loaded.
        """
        stream = self._loaded
        known = {each.name for each in stream.tensors}
        if missing := set(names) - known:
            raise SyncError(
                f"the trainer sends no {', '.join(sorted(missing))}; names are those of the offer"
            )
        weights = stream.whole(engine.model, stream.owners(names or known))
        every = gather_results(lambda: {name: hash_tensor(each) for name, each in weights}, dict[str, str])
        return {name: digest for each in every for name, digest in each.items()}

    @property
    def _loaded(self) -> WeightStream:
        if self._stream is None:
            raise SyncError("the trainer has nothing loaded, so it has no weights")
        return self._stream

    def _meet(self, device: torch.device) -> None:
        """Open the store and shared memory on rank 0 unless open, and exchange ports and locations of all ranks; a collective."""
        sync, size = self._config.sync, self._plan.total_bytes
        # An error is exchanged and raised on all ranks: a rank that raised alone would leave the others in the collective.
        failure = self._serve()
        if self._memory and len(self._memory.stream) != size:
            self._memory.close()
            self._memory = None
        if self._rank == 0 and sync.transport in _BY_MEMORY and self._memory is None:
            self._memory = SharedMemory(size)
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        memory = self._memory.path if self._memory else ""
        every = all_gather_messages(
            _Meeting(self._host, self._port, machine_id(), gpu, memory, failure), _Meeting
        )
        first, gpus = every[0], {each.gpu for each in every}
        if first.failure:
            raise SyncError(first.failure)
        is_one_machine = len({each.machine for each in every}) == 1
        if not is_one_machine and ip_address(first.host).is_loopback:
            raise SyncError(
                f"sync.host={sync.host!r} is {first.host}, which other machines do not reach; {_REMEDY}"
            )
        # Ranks on several machines have no memory in common that a server could read.
        self._host, self._port, self._shared = first.host, first.port, first.memory if is_one_machine else ""
        self._location = ProcessLocation(first.machine, device.type, tuple(sorted(filter(None, gpus))))

    def _serve(self) -> str:
        """Open the store on rank 0 unless open; returns an error's text, else "", so that all ranks can raise the error."""
        sync = self._config.sync
        if self._rank == 0 and self._store is None:
            try:
                self._store = serve_store(sync.host, sync.timeout_s)
            except (RuntimeError, OSError) as error:
                return f"cannot listen at sync.host={sync.host!r}: {error}; {_REMEDY}"
            self._host, self._port = self._store.host, self._store.port
        return ""

    def _open_shared_stream(self) -> torch.Tensor | None:
        """Open [total_bytes] uint8 shared memory that all ranks write and servers read; None if there is none."""
        if self._memory or not self._shared:
            return self._memory.stream if self._memory else None
        return open_shared(self._shared, self._plan.total_bytes, is_writable=True)

    def _connect(self, device: torch.device) -> tuple[WeightSender, SendProgress]:
        """Connect to the store unless connected; returns the sender of weights and its progress.

        Raises:
            SyncError: the store cannot be reached.
        """
        sync, host, port = self._config.sync, self._host, self._port
        if self._sender is None or self._progress is None:
            try:
                store = join_store(host, port, sync.timeout_s)
                self._sender = WeightSender(self._rank, host, port, sync, device=device)
            except (RuntimeError, OSError) as error:
                raise SyncError(f"cannot reach {host}:{port}: {error}; {_REMEDY}") from error
            self._progress = SendProgress(
                store, self._rank, self._world_size, self._config.progress_interval_s
            )
        return self._sender, self._progress


def _save_part(part: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    """Write tensors into a safetensors file; StoreError names path and reason."""
    try:
        save_file(part, path, metadata)
    except (OSError, SafetensorError) as error:
        remedy = "make room, or let this user write there, or name another sync.folder"
        raise StoreError(f"cannot write weights to {path}: {error}; {remedy}") from error


def _drain(rest: Iterable[object]) -> None:
    """Exhaust an iterator whose steps are collectives, so that the other ranks do not wait for this one."""
    for _ in rest:
        pass
