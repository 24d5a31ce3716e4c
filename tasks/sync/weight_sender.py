"""One trainer rank's end of a weight transfer: sends its buckets to every server, a thread for each link."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.observe.spans import current_lane, time_items
from rollmill.tasks.sync.bucket_writer import (
    AwaitTaken,
    BucketWriter,
    Piece,
    ReadyBucket,
    StagingMemory,
    copy_into_stream,
)
from rollmill.tasks.sync.changed_buckets import ChangesPublisher, SentCopy
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.ipc_link import IpcSender
from rollmill.tasks.sync.links.link import (
    CPU,
    Rendezvous,
    SendingLink,
    find_refused,
    join_store,
    link_name,
    local_address,
)
from rollmill.tasks.sync.links.nccl_link import NcclSender
from rollmill.tasks.sync.links.shm_link import SharedSender
from rollmill.tasks.sync.links.tcp_link import TcpSender
from rollmill.tasks.sync.server_transfer import (
    WAITING_FOR_RECEIVER,
    BackPressure,
    ServerTransfer,
    TimeLimit,
)
from rollmill.tasks.sync.transfer_plan import Bucket, TransferPlan
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget

SENDERS: Mapping[str, Callable[[Rendezvous], SendingLink]] = {
    "tcp": TcpSender,
    "nccl": NcclSender,
    "shm": SharedSender,
    "ipc": IpcSender,
}
"""The trainer's end of a link, by transport."""

SOURCE_MEMORY = {"tcp": "cpu", "nccl": "cuda", "shm": "shared", "ipc": "exported"}
"""The memory from which a transport sends: host memory, the GPU's, the segment that servers read, or a ring of the GPU that they open."""
_CHANGES = "changes"
"""The memory from which changes are sent, by any transport."""


# Seconds that slower servers get once the first one has everything: the rest take the weights by files, and training resumes.
STRAGGLER_TIMEOUT_S = 30.0
# Seconds between two looks at which servers have refused: each is a request to the store.
REFUSAL_CHECK_S = 0.5


class WeightSender:
    """Sends a rank's part of the weights to any number of servers, over separate links to each.

    Args:
        rank: its number among the plan's ranks.
        host: address of the store through which links are opened.
        port: port of the store.
        config: settings of the sync, for its time limits.
        straggler_timeout_s: seconds that slower servers get after the first one has everything.
        device: of the rank's weights.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        port: int,
        config: SyncConfig,
        straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
        device: torch.device = CPU,
    ) -> None:
        self._rank, self._config, self._straggler_timeout_s = rank, config, straggler_timeout_s
        self._device = device
        self._store = join_store(host, port, config.timeout_s)
        self._address = local_address(host, port, config.timeout_s)
        self._links: dict[str, tuple[str, list[SendingLink]]] = {}
        self._staging = {
            "cpu": StagingMemory(CPU),
            "cuda": StagingMemory(device),
            "exported": StagingMemory(device, copies_all=True),
        }
        self._transfers: Mapping[str, ServerTransfer] = {}
        self._sent = SentCopy()

    def forget_sent(self) -> None:
        """Free the copy of the weights that were sent last; the next transfer to each server is of the whole."""
        self._sent.forget()

    def send(
        self,
        plan: TransferPlan,
        targets: Sequence[SendTarget],
        pieces: Iterable[Piece],
        shared: torch.Tensor | None = None,
    ) -> list[SendResult]:
        """Send this rank's part of the weights; a server that fails does not hold the others.

        If a target names the snapshot, the rank keeps a copy of its part, and a target that has the last one gets the changes.
        The weights may change once it returns.

        Args:
            plan: the transfer plan.
            targets: the servers.
            pieces: this rank's part of the stream or more, in order.
            shared: [total_bytes] uint8 that targets with the transport shm read.

        Returns:
            The outcome for each target, in their order.

        Raises:
            SyncError: the pieces do not match the plan.
        """
        started, buckets = time.monotonic(), plan.buckets(self._rank)
        too_long = f"it took longer than {self._config.timeout_s:g} s (sync.timeout_s)"
        limit = TimeLimit(started + self._config.timeout_s, too_long)
        pressure = BackPressure(limit, self._straggler_timeout_s, self._config.stall_timeout_s / 2)
        snapshot = next((each.snapshot for each in targets if each.snapshot), "")
        sources = {each.server: self._source_memory(plan, each, shared) for each in targets}
        # Changes are of what is in host memory.
        memories = [*sources.values(), "cpu"] if snapshot else sources.values()
        ready: dict[str, list[ReadyBucket]] = {each: [Future() for _ in buckets] for each in memories}
        ended = queue.SimpleQueue[ServerTransfer]()
        self._transfers = transfers = self._prepare_transfers(
            plan.streams, buckets, targets, sources, ready, ended.put, pressure.notify
        )
        if snapshot:
            self._sent.begin(plan, buckets)
        writers = self._make_writers(buckets, sources, ready, pressure, shared, keeps_copy=bool(snapshot))
        try:
            with self._give_up_refused(targets, transfers):
                for transfer in transfers.values():
                    transfer.start()
                _write_buckets(writers, pieces)
                if snapshot:
                    self._sent.finish(snapshot)
                filled_ns = time.perf_counter_ns()
                self._await(transfers, ended, limit)
            _record_stalls(transfers, filled_ns)
        except Exception as error:
            _give_up_all(transfers, ready, f"the trainer could not send its weights: {error}")
            raise
        finally:
            # The optimizer may change the weights as soon as this returns.
            self._join_transfers()
        return [
            SendResult(server, each.carried_bytes, each.ended_at - started, each.error)
            for server, each in transfers.items()
        ]

    def _join_transfers(self) -> None:
        """Wait for the threads of all transfers; the links of one that failed are opened again next time."""
        for server, transfer in self._transfers.items():
            transfer.join()
            if transfer.error:
                self._links.pop(server)

    def _source_memory(self, plan: TransferPlan, target: SendTarget, shared: torch.Tensor | None) -> str:
        """Return the memory from which a target gets its weights: changes if it holds what was sent last; SyncError without it."""
        if target.transport not in SENDERS:
            raise SyncError(f"expected a link by {', '.join(SENDERS)}, got {target.transport!r}")
        memory = SOURCE_MEMORY[target.transport]
        if memory == "shared" and shared is None:
            raise SyncError("there is no shared memory to write weights to: set sync.transport=tcp")
        has_base = target.base_snapshot and self._sent.has(plan, target.base_snapshot)
        return _CHANGES if has_base else memory

    def _make_writers(
        self,
        buckets: Sequence[Bucket],
        sources: Mapping[str, str],
        ready: dict[str, list[ReadyBucket]],
        pressure: BackPressure,
        shared: torch.Tensor | None,
        *,
        keeps_copy: bool,
    ) -> list[BucketWriter]:
        """Create a writer for each memory in `ready`; it waits for the servers that read this memory."""

        def await_taken(memory: str) -> AwaitTaken:
            servers = [server for server, source in sources.items() if source == memory]
            return partial(pressure.await_taken, {server: self._transfers[server] for server in servers})

        writers = []
        for memory, each in ready.items():
            if memory == "shared" and shared is not None:
                writers.append(BucketWriter(buckets, copy_into_stream(shared), each))
            elif memory != _CHANGES:
                keep = self._staging[memory].keeper(buckets, await_taken(memory))
                if memory == "cpu" and keeps_copy:
                    publisher = ChangesPublisher(self._sent, ready.get(_CHANGES, []), await_taken(_CHANGES))
                    writers.append(BucketWriter(buckets, keep, each, publisher.publish))
                else:
                    writers.append(BucketWriter(buckets, keep, each))
        return writers

    def _prepare_transfers(
        self,
        streams: int,
        buckets: Sequence[Bucket],
        targets: Sequence[SendTarget],
        sources: Mapping[str, str],
        ready: Mapping[str, Sequence[ReadyBucket]],
        on_end: Callable[[ServerTransfer], None],
        on_taken: Callable[[], None],
    ) -> dict[str, ServerTransfer]:
        """Create each server's transfer, by its address."""
        sizes = [bucket.size_bytes for bucket in buckets]
        return {
            each.server: ServerTransfer(
                self._links_to(each, streams),
                streams,
                sizes,
                ready[sources[each.server]],
                on_end,
                on_taken,
                is_changes=sources[each.server] == _CHANGES if each.base_snapshot else None,
            )
            for each in targets
        }

    def progress(self) -> dict[str, int]:
        """Return the bytes sent to each server in the current or last transfer; may be called from any thread."""
        return {server: each.sent_bytes for server, each in self._transfers.items()}

    def close(self) -> None:
        """Close all links to all servers."""
        for _, links in self._links.values():
            for link in links:
                link.close()
        self._links.clear()

    @contextmanager
    def _give_up_refused(
        self, targets: Sequence[SendTarget], transfers: Mapping[str, ServerTransfer]
    ) -> Iterator[None]:
        """Give up, while the block runs, transfers whose server has refused the weights (`report_refusal`)."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(REFUSAL_CHECK_S):
                refused = find_refused(self._store, [each.prefix for each in targets])
                for each in targets:
                    if each.prefix in refused:
                        transfers[each.server].give_up("the server refused the weights")

        watcher = threading.Thread(target=watch, name="refusals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _await(
        self,
        transfers: Mapping[str, ServerTransfer],
        ended: "queue.SimpleQueue[ServerTransfer]",
        limit: TimeLimit,
    ) -> None:
        """Wait until all transfers have ended, and give up those that exceed the time limits."""
        left = set(transfers.values())
        while left:
            try:
                done = ended.get(timeout=max(limit.deadline - time.monotonic(), 0.0))
            except queue.Empty:
                for each in left:
                    each.give_up(limit.reason)
                return
            left.remove(done)
            # A server that failed shows nothing about how long the others need.
            sooner = done.ended_at + self._straggler_timeout_s
            if not done.error and sooner < limit.deadline:
                limit = TimeLimit(
                    sooner, f"it was not done {self._straggler_timeout_s:g} s after another server"
                )

    def _links_to(self, target: SendTarget, streams: int) -> dict[SendingLink, bool]:
        """Return the [workers * streams] links to a server, each with True if it is open already.

        They are open if the last transfer to the server had the same prefix.
        """
        prefix, links = self._links.get(target.server, ("", []))
        if prefix == target.prefix:
            return dict.fromkeys(links, True)
        # A server that asks for new links no longer reads the old ones.
        for link in links:
            link.close()
        limits = self._config.timeout_s, self._config.stall_timeout_s
        links = [
            SENDERS[target.transport](
                Rendezvous(
                    self._store,
                    link_name(target.prefix, self._rank, worker, stream),
                    self._address,
                    *limits,
                    self._device,
                    target.prefix,
                )
            )
            for worker in range(target.workers)
            for stream in range(streams)
        ]
        self._links[target.server] = target.prefix, links
        return dict.fromkeys(links, False)


def _write_buckets(writers: Sequence[BucketWriter], pieces: Iterable[Piece]) -> None:
    for piece in time_items(pieces, "gathering"):
        for writer in writers:
            writer.add(piece)
    for writer in writers:
        writer.finish()


def _give_up_all(
    transfers: Mapping[str, ServerTransfer], ready: Mapping[str, Sequence[ReadyBucket]], reason: str
) -> None:
    """Give up all transfers because the weights are incomplete; `reason` is the error that each gets."""
    # Threads that wait for a bucket end by the one, threads that wait for a server by the other.
    for bucket in (each for buckets in ready.values() for each in buckets):
        if not bucket.done():
            bucket.set_exception(SyncError(reason))
    for transfer in transfers.values():
        transfer.give_up(reason)


def _record_stalls(transfers: Mapping[str, ServerTransfer], filled_ns: int) -> None:
    """Record, as spans, how long this rank waited for the slowest server after its own buckets were ready."""
    lane = current_lane()
    if lane is None or not transfers:
        return
    server, last = max(transfers.items(), key=lambda each: each[1].ended_at)
    for started, ended in last.stalls:
        if ended > filled_ns:
            lane.add(WAITING_FOR_RECEIVER, max(started, filled_ns), ended, server)
