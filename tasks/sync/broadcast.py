"""The flow's part in a weight sync: sends one policy version from the trainer to its servers."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from rollmill.tasks.errors import (
    ConfigError,
    RequestError,
    RequestsHeldError,
    ServiceError,
    SyncError,
)
from rollmill.tasks.observe.span_waits import wait_for_others
from rollmill.tasks.observe.spans import add_spans, current_lane, shift_spans
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.weight_messages import (
    CHANGES_TRANSPORTS,
    FIRST_RANK,
    REQUESTS_HELD,
    SHARED_TRANSPORTS,
    WAITING_FOR_TRAINER,
    ProcessLocation,
    ProgressCallback,
    SendResult,
    SendTarget,
    ServerLocation,
    WeightOffer,
    WeightUpdateRequest,
    WeightUpdateResponse,
    encode_plan,
)
from rollmill.tasks.sync.weight_parity import Logprobs

VERIFY = "verify"
"""Mode of a request whose weights the server only compares with its live ones."""

FILES = "files"
"""Transport by which servers read files. The trainer takes no part in it once they are written."""


class WeightSource(Protocol):
    """Interface of the trainer for a weight sync: it offers weights and sends them."""

    async def offer(self) -> WeightOffer:
        """Return a description of the weights that the trainer can send, and the address at which links are opened."""

    async def send(
        self, targets: Sequence[SendTarget], report: ProgressCallback | None, every_s: float
    ) -> list[SendResult]:
        """Send the weights to all servers concurrently; a server that fails does not delay the others.

        Calls `report`, unless it is None, every `every_s` seconds.
        """

    async def stop_sending(self, target: SendTarget) -> None:
        """End the transfer to one server, which has refused the weights, before its time limit."""


def create_prefix() -> str:
    """Create a random prefix, which names the links to a server and is their secret: its next transfer opens new links."""
    return secrets.token_hex(16)


REPORT_S = 10.0
"""Seconds between two reports of the progress of a transfer."""


class Broadcast:
    """Sends one version to several servers: call `send` once and, concurrently, `update_server` for each of them.

    Args:
        source: the trainer, which sends.
        offer: the weights that the trainer can send.
        routes: how weights reach each server.
        version: name of the weights.
        config: settings.
        checksums: names of the tensors whose checksums the servers return.
        files: paths or addresses of the weights, for servers that read files; the trainer sends to the others alone.
        snapshot: name under which the servers keep the weights, by `name_snapshot`; empty: they do not.
        mode: `WeightUpdateRequest.mode`; empty: that of the settings.
        report: called every REPORT_S seconds with the trainer's progress, unless it is None.

    Attributes:
        updated: the servers that have the weights in place.
        starts_ns: when each server in `updated` began, by its address, in nanoseconds since 1970.
        snapshots: the snapshot that each server in `updated` holds now, by its address; empty if it keeps none.
    """

    def __init__(
        self,
        source: WeightSource,
        offer: WeightOffer,
        routes: Mapping[VllmClient, SendTarget],
        version: str,
        config: SyncConfig,
        checksums: Sequence[str] = (),
        files: Sequence[str] = (),
        *,
        snapshot: str = "",
        mode: str = "",
        report: ProgressCallback | None = None,
    ) -> None:
        self._source, self._offer, self._routes = source, offer, routes
        self._version, self._config, self._checksums = version, config, tuple(checksums)
        # Once for all servers: a large model may have 20,000 tensors.
        self._plan = encode_plan(offer.plan)
        self._files, self._mode, self._report = tuple(files), mode or config.mode, report
        self.updated: set[VllmClient] = set()
        self.starts_ns: dict[str, int] = {}
        self.snapshots: dict[str, str] = {}
        self._snapshot = snapshot
        self._results: asyncio.Future[dict[str, SendResult]] = asyncio.Future()

    async def send(self) -> list[SendResult]:
        """Have the trainer send to all servers that do not read files; returns the outcome for each, in their order.

        Raises:
            ServiceError: the trainer is gone.
        """
        targets = [
            replace(each, snapshot=self._snapshot_for(each))
            for each in self._routes.values()
            if each.transport != FILES
        ]
        try:
            sent = await self._source.send(targets, self._report, REPORT_S) if targets else []
        except (RequestError, SyncError) as error:
            sent = [SendResult(each.server, 0, 0.0, f"trainer: {error}") for each in targets]
        self._results.set_result({each.server: each for each in sent})
        return sent

    async def update_server(self, server: VllmClient) -> WeightUpdateResponse:
        """Have a server receive the weights; returns when they are in place and its requests continue.

        Raises:
            RequestsHeldError: it failed while it switched weights, so its requests stay held.
            SyncError: it failed before that, and still serves the old weights.
        """
        what = f"receiving version {self._version} by {self.transport(server)}"
        async with name_errors(server, what, self._config.timeout_s):
            request = msgspec.json.encode(self._build_request(self._routes[server]))
            asked_ns = time.time_ns()
            updating = asyncio.ensure_future(server.update_weights(request, self._config.timeout_s))
            ends: set[asyncio.Future[Any]] = {updating, self._results}
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not updating.done() and (error := self._send_error(server)):
                    # The server reports what it lacks, and its error is more precise than the trainer's.
                    await asyncio.wait({updating}, timeout=self._config.stall_timeout_s)
                    if not updating.done():
                        raise SyncError(error)
                response = msgspec.json.decode(await updating, type=WeightUpdateResponse)
            except RequestError:
                await self._stop_sending(server)
                raise
            finally:
                # The server notices the lost connection and gives the update up.
                updating.cancel()
        self.updated.add(server)
        self.starts_ns[server.url] = _keep_server_spans(server, response, asked_ns)
        self.snapshots[server.url] = response.snapshot
        return response

    def transport(self, server: VllmClient) -> str:
        """Return the transport by which weights reach a server."""
        return self._routes[server].transport

    async def _stop_sending(self, server: VllmClient) -> None:
        """End the trainer's transfer to a server, unless it has ended."""
        if self._results.done() or self.transport(server) == FILES:
            return
        # Otherwise the trainer waits until sync.timeout_s for links that the server does not open. It still does if it refuses this
        # command; the server's error is raised in both cases.
        with suppress(RequestError):
            await self._source.stop_sending(self._routes[server])

    def _send_error(self, server: VllmClient) -> str:
        """Return why the trainer gave a server up; empty if it did not, or does not send to the server."""
        result = self._results.result().get(server.url)
        return result.error if result else ""

    def _build_request(self, route: SendTarget) -> WeightUpdateRequest:
        return WeightUpdateRequest(
            version=self._version,
            mode=self._mode,
            transport=route.transport,
            plan=self._plan,
            timeout_s=self._config.timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
            base=self._offer.base,
            host=self._offer.host,
            port=self._offer.port,
            prefix=route.prefix,
            shared=self._offer.shared,
            files=self._files if route.transport == FILES else (),
            checksums=self._checksums,
            snapshot=self._snapshot_for(route),
            base_snapshot=route.base_snapshot,
        )

    def _snapshot_for(self, route: SendTarget) -> str:
        """Return the name of this transfer's bytes for a server that is to keep them; empty if its transport sends no changes."""
        return self._snapshot if route.transport in CHANGES_TRANSPORTS else ""


def name_snapshot(version: str, config: SyncConfig) -> str:
    """Return a new name for the bytes of one transfer of a version; empty if the settings ask for whole weights."""
    # The same weights sent again are another snapshot: what a server holds must be what this transfer brought.
    return f"{version}/{secrets.token_hex(8)}" if config.send == "changes" else ""


def _keep_server_spans(server: VllmClient, response: WeightUpdateResponse, asked_ns: int) -> int:
    """Record a server's spans under the current step; returns when the first began, by the flow's clock, in ns since 1970."""
    lane, until_ns = current_lane(), time.time_ns()
    step = lane.step if lane else -1
    spans = shift_spans(
        [each._replace(process=server.url, step=step) for each in response.spans], asked_ns, until_ns
    )
    add_spans(spans)
    return min((each.started_ns for each in spans), default=asked_ns)


async def find_route(
    server: VllmClient, offer: WeightOffer, config: SyncConfig, failed: Collection[str] = ()
) -> tuple[SendTarget, str]:
    """Choose how weights reach a server; returns the route, whose links are not open yet, and why its transport was chosen.

    `failed` are transports that failed for this server before.

    Raises:
        ConfigError: the configured transport cannot reach it.
        SyncError: the server does not report where it runs.
    """
    async with name_errors(server, "reporting where it runs", config.timeout_s):
        location = msgspec.json.decode(await server.read_location(), type=ServerLocation)
    try:
        transport, reason = choose_transport(
            config.transport,
            offer.location,
            location,
            shares_memory=bool(offer.shared),
            failed=failed,
        )
    except ValueError as error:
        raise ConfigError("sync.transport", config.transport, f"server {server.url}: {error}") from error
    workers = 1 if transport in SHARED_TRANSPORTS else location.workers
    return SendTarget(server.url, transport, create_prefix(), workers), reason


def choose_transport(
    setting: str,
    trainer: ProcessLocation,
    server: ServerLocation,
    *,
    shares_memory: bool,
    failed: Collection[str] = (),
) -> tuple[str, str]:
    """Choose the transport to a server, the configured one or the fastest that is possible; returns it and the reason.

    Args:
        setting: the setting `sync.transport`.
        trainer: location of rank 0.
        server: location of the server.
        shares_memory: True if the trainer offers its weights in shared memory.
        failed: transports that failed for this server before, which `auto` passes over; never tcp, which goes everywhere.

    Raises:
        ValueError: the configured transport cannot work there; names the reason and a remedy.
    """
    if setting != "auto":
        if obstacle := _find_obstacle(setting, trainer, server, shares_memory):
            raise ValueError(f"{obstacle}; give tcp, or auto")
        return setting, "sync.transport sets it"
    reasons = {"nccl": "are on different GPUs", "ipc": "share one GPU", "shm": "are on one machine"}
    failed = [each for each in reasons if each in failed]
    after = f", and {' and '.join(failed)} failed before" if failed else ""
    obstacle = ""
    for transport, reason in reasons.items():
        obstacle = _find_obstacle(transport, trainer, server, shares_memory)
        if not obstacle and transport not in failed:
            return transport, f"trainer and server {reason}{after}"
    return "tcp", (obstacle or "it goes everywhere") + after


def _find_obstacle(
    transport: str, trainer: ProcessLocation, server: ServerLocation, shares_memory: bool
) -> str:
    """Return why a transport cannot work between trainer and server; empty if it can."""
    is_one_machine = trainer.machine == server.machine
    if transport == "nccl":
        for who, location in (("trainer", trainer), ("server", server)):
            if location.device != "cuda":
                return f"the {who} is on {location.device}, and nccl connects GPUs"
        shared = set(trainer.gpus) & set(server.gpus)
        if shared or (is_one_machine and not (trainer.gpus and server.gpus)):
            which = ", ".join(sorted(shared)) or "that are not known"
            return f"trainer and server are on the same GPUs ({which}), and nccl connects different ones"
    if transport == "ipc" and not (is_one_machine and len(trainer.gpus) == 1 and trainer.gpus == server.gpus):
        return "trainer and server do not share one GPU, which is all that ipc connects"
    if transport == "shm":
        if not is_one_machine:
            return "trainer and server are on different machines, or in different containers of one"
        if not shares_memory:
            return "the trainer offers no shared memory"
    return ""


async def fetch_logprobs(
    expecting: Coroutine[Any, Any, Logprobs],
    server: VllmClient,
    sequences: Sequence[np.ndarray],
    version: str,
    *,
    timeout_s: float,
) -> tuple[Logprobs, Logprobs]:
    """Fetch the trainer's and the server's log-probabilities of known tokens, concurrently; each [B][T-1], in nats.

    `expecting` gives the trainer's. While it takes longer than the server, the time is recorded as a wait for the trainer.

    Raises:
        SyncError: one of the two did not answer within `timeout_s` seconds.
    """
    what = f"comparing log-probabilities at version {version}"
    async with name_errors(server, what, timeout_s), asyncio.TaskGroup() as group:
        expected = group.create_task(expecting)
        found = group.create_task(score_by_server(server, sequences, timeout_s))
        # The server first: only what the trainer takes longer is a wait for the trainer.
        await asyncio.wait([found])
        await wait_for_others(WAITING_FOR_TRAINER, FIRST_RANK, expected)
    return expected.result(), found.result()


async def score_by_server(
    server: VllmClient, sequences: Sequence[np.ndarray], timeout_s: float
) -> list[np.ndarray]:
    """Fetch a server's log-probabilities of known tokens: for each sequence [T-1] float32, in nats.

    Raises:
        ExceptionGroup: of RequestError: it did not answer in time.
    """
    async with asyncio.TaskGroup() as group:
        scored = [group.create_task(server.prompt_logprobs(each, timeout_s)) for each in sequences]
    return [each.result() for each in scored]


@asynccontextmanager
async def name_errors(server: VllmClient, what: str, limit_s: float) -> AsyncIterator[None]:
    """Limit the time of a block, and raise its failures as SyncError that names the server and `what` it was doing.

    Args:
        server: the server that the block calls.
        what: what the server does meanwhile, for the error.
        limit_s: the time limit in seconds, sync.timeout_s.

    Raises:
        RequestsHeldError: the server reported that its requests are held.
        ServiceError: one that a task group of the block raised.
        SyncError: another failure, or the time limit passed.
    """
    where = f"server {server.url}: {what}"
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise SyncError(f"{where} took longer than sync.timeout_s = {limit_s:g} s") from None
    except (RequestError, SyncError) as error:
        kind = RequestsHeldError if REQUESTS_HELD in str(error) else SyncError
        raise kind(f"{where}: {error}") from error
    except msgspec.MsgspecError as error:
        raise SyncError(f"{where}: it answers in a form that this version does not know: {error}") from error
    except ExceptionGroup as group:
        for each in group.exceptions:
            if isinstance(each, ServiceError | SyncError):
                raise each from group
        raise SyncError(f"{where}: {'; '.join(map(str, group.exceptions))}") from group
