"""The trainer's end of a weight transfer: fills buckets and sends them to every server."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan, plan_transfer
from tasks.sync.link import RECEIVER, SENDER, as_bytes, open_link, serve_store

N_BUFFERS = 2
"""One is filled while the other is on the wire."""


class Meta(Protocol):
    """Name, shape and type of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class WeightSender:
    """Sends one model's weights to any number of servers, over a link of its own for each.

    Args:
        host: address of this machine that the servers reach.
        bucket_bytes: bytes of one transfer buffer.
        timeout_s: seconds that a join, or one bucket's way, may take.
    """

    def __init__(self, host: str, bucket_bytes: int, timeout_s: float) -> None:
        self._host, self._bucket_bytes, self._timeout_s = host, bucket_bytes, timeout_s
        self._store = serve_store(host, timeout_s)
        self._links: dict[str, Any] = {}
        self._plan: TransferPlan | None = None
        self._buffers: list[torch.Tensor] = []

    def rendezvous(self) -> dict[str, Any]:
        """Where servers join: {"host", "port"}."""
        return {"host": self._host, "port": self._store.port}

    def connect(self, server: str, prefix: str) -> None:
        """Wait until a server has joined under `prefix`; a link it had before is dropped.

        Raises:
            SyncError: it did not within the timeout.
        """
        self.disconnect(server)
        try:
            self._links[server] = open_link(self._store, prefix, SENDER, self._host, self._timeout_s)
        except RuntimeError as error:
            raise SyncError(f"server {server} did not join within {self._timeout_s:g} s: {error}") from error

    def disconnect(self, server: str) -> None:
        """Drop the link to a server, if there is one."""
        self._links.pop(server, None)

    def plan(self, metas: Iterable[Meta]) -> dict[str, Any]:
        """Lay out the weights; returns what a server must know beforehand, as JSON."""
        described = [(meta.name, meta.shape, str(meta.dtype).removeprefix("torch.")) for meta in metas]
        self._plan = plan_transfer(described, self._bucket_bytes)
        size = min(self._bucket_bytes, self._plan.total_bytes)
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = _new_buffers(size)
        return self._plan.to_json()

    def send(self, servers: Sequence[str], tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Send all weights, in the order of the plan, to servers that have joined.

        Returns:
            {"bytes", "buckets", "seconds"} of one server.

        Raises:
            SyncError: a server has not joined or stopped receiving, or the tensors are not those of the plan.
        """
        if self._plan is None:
            raise SyncError("weights are sent before they were planned")
        if strangers := set(servers) - set(self._links):
            raise SyncError(f"servers that have not joined: {', '.join(sorted(strangers))}")
        started = time.perf_counter()
        try:
            n_buckets = self._send(self._plan, servers, tensors)
        except SyncError:
            for server in servers:  # what is still under way would be taken for the next transfer's
                self.disconnect(server)
            self._buffers = _new_buffers(self._buffers[0].numel())
            raise
        seconds = time.perf_counter() - started
        return {"bytes": self._plan.total_bytes, "buckets": n_buckets, "seconds": seconds}

    def _send(
        self, plan: TransferPlan, servers: Sequence[str], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> int:
        """Send each bucket as soon as it is full; returns how many there were when the last has arrived."""
        under_way: list[list[tuple[str, Any]]] = [[] for _ in self._buffers]
        n_buckets = 0
        for bucket in self._fill(plan, tensors, under_way):
            works = under_way[n_buckets % len(self._buffers)]
            for server in servers:
                try:
                    works.append((server, self._links[server].send([bucket], RECEIVER, 0)))
                except RuntimeError as error:
                    raise SyncError(f"server {server} does not take bucket {n_buckets}: {error}") from error
            n_buckets += 1
        for works in under_way:
            _wait(works)
        return n_buckets

    def _fill(
        self,
        plan: TransferPlan,
        tensors: Iterable[tuple[str, torch.Tensor]],
        under_way: list[list[tuple[str, Any]]],
    ) -> Iterator[torch.Tensor]:
        """Copy the stream of bytes into the buffers, and give each when it is full and free to be sent."""
        pieces = _pieces(plan, tensors)
        piece_start, piece = next(pieces, (0, torch.empty(0, dtype=torch.uint8)))
        for number, (start, end) in enumerate(plan.buckets()):
            slot = number % len(self._buffers)
            _wait(under_way[slot])
            buffer = self._buffers[slot][: end - start]
            while True:
                first, last = max(piece_start, start), min(piece_start + piece.numel(), end)
                if first < last:
                    buffer[first - start : last - start].copy_(
                        piece[first - piece_start : last - piece_start]
                    )
                if piece_start + piece.numel() > end:
                    break
                following = next(pieces, None)
                if following is None:
                    break
                piece_start, piece = following
            yield buffer


def _new_buffers(size: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for _ in range(N_BUFFERS)]


def _pieces(
    plan: TransferPlan, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(offset in the stream, bytes) of each tensor, checked against the plan."""
    for expected, given in zip_longest(plan.tensors, tensors):
        if expected is None or given is None:
            what = "more" if expected is None else f"none for {expected.name}"
            raise SyncError(f"expected the {len(plan.tensors)} tensors of the plan, got {what}")
        name, tensor = given
        data = as_bytes(tensor.detach().to("cpu").contiguous())
        if name != expected.name or data.numel() != expected.size_bytes:
            raise SyncError(
                f"expected {expected.name} of {expected.size_bytes} bytes, got {name} of {data.numel()}"
            )
        yield expected.offset, data


def _wait(works: list[tuple[str, Any]]) -> None:
    """Wait for sends, and forget them."""
    for server, work in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise SyncError(f"server {server} stopped receiving: {error}") from error
    works.clear()
