"""The vLLM servers that may receive requests: choose one for each group, and record how busy each one is."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, NamedTuple, Protocol

from rollmill.tasks.errors import ConnectionLostError, TransientRequestError
from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.observe.span_waits import WaitSpan
from rollmill.tasks.observe.spans import Recorder, current_lane, span
from rollmill.tasks.serve.vllm_client import VllmClient

GENERATING, IDLE = "generating", "idle"


class Occupancy:
    """Records the spans of one server: `generating` while a client's request is running, else `idle`.

    Args:
        address: address of the server, and name of the process that the spans are recorded under.
        recorder: stores the spans.
        is_admitted: returns True while the server may receive requests.
        client: whose requests they are; empty: those of the recorder's process.
    """

    def __init__(
        self, address: str, recorder: Recorder, is_admitted: Callable[[], bool], client: str = ""
    ) -> None:
        self._lane = recorder.foreign_lane(address, f"requests of {client or recorder.process}")
        self._recorder, self._is_admitted = recorder, is_admitted
        self._n_requests = 0
        self._now = WaitSpan(IDLE, self._lane, self._idle_for)
        recorder.watch(self.look, self.cut)

    def begin_request(self) -> None:
        """Count one more running request; the first one ends the idle span."""
        self._n_requests += 1
        if self._n_requests == 1:
            self._switch_to(GENERATING, lambda: "")

    def end_request(self) -> None:
        """Count one running request less; after the last one an idle span begins."""
        self._n_requests -= 1
        if not self._n_requests:
            self._switch_to(IDLE, self._idle_for)

    def look(self) -> None:
        """Begin a new span if the server is now idle for another reason than at the beginning of the current span."""
        self._now.look()

    def cut(self) -> None:
        """Record the current span up to now, and continue with a new one."""
        self._now.cut()

    def _switch_to(self, name: str, cause: Callable[[], str]) -> None:
        self._now.end()
        self._now = WaitSpan(name, self._lane, cause)

    def _idle_for(self) -> str:
        """Return why the server is idle: what the step does meanwhile, or "not in the pool" if the server is not in the pool."""
        return self._recorder.step_does if self._is_admitted() else "not in the pool"


class ServerChange(NamedTuple):
    """One change of a pool, for the pools of other processes.

    Attributes:
        url: of the server.
        api_key: of the server; empty: none.
        version: of unverified weights.
    """

    kind: Literal["admit", "mark_unverified", "reject", "remove", "end_requests"]
    url: str
    api_key: str
    version: str = ""


class PoolMirror(Protocol):
    """The pools of other processes, which have the same servers."""

    def change(self, change: ServerChange) -> None:
        """Begin to make a change there, after those before it."""

    async def settle(self) -> None:
        """Wait until all changes so far are made."""


class ServerPool:
    """The vLLM servers that may receive requests; each group of trajectories keeps one of them.

    A group gets the server with the fewest outstanding tokens when it first needs one, and again when its own is removed or
    avoided.

    All servers serve the policy. While the pool is empty, requests wait until a server's watcher admits a server again or ends
    the run.

    Args:
        client: name of what sends the requests, in spans; empty: that of the process.

    Attributes:
        mirror: pools of other processes that follow this one; None without any.
    """

    def __init__(self, client: str = "") -> None:
        self._client = client
        self._outstanding_tokens: Counter[VllmClient] = Counter()
        self._admitted: set[VllmClient] = set()
        self._server_of_group: dict[int, VllmClient] = {}
        self._is_open = asyncio.Event()
        # By server: the version that it has received, and whether its weights turn out to be right.
        self._unverified: dict[VllmClient, tuple[str, asyncio.Future[bool]]] = {}
        self._failures_in_a_row: Counter[VllmClient] = Counter()
        self._alarms: dict[VllmClient, asyncio.Event] = {}
        self._occupancies: dict[VllmClient, Occupancy] = {}
        self._counts: Counter[str] = Counter()
        self._max_outstanding = 0
        self.mirror: PoolMirror | None = None

    @property
    def changes(self) -> list[ServerChange]:
        """The changes that make an empty pool like this one."""
        unverified = [
            ServerChange("mark_unverified", each.url, each.api_key, version)
            for each, (version, _) in self._unverified.items()
        ]
        return [ServerChange("admit", each.url, each.api_key) for each in self._admitted] + unverified

    def _mirror(
        self,
        kind: Literal["admit", "mark_unverified", "reject", "remove", "end_requests"],
        server: VllmClient,
        version: str = "",
    ) -> None:
        if self.mirror is not None:
            self.mirror.change(ServerChange(kind, server.url, server.api_key, version))

    async def settle(self) -> None:
        """Wait until the pools of other processes have all changes so far."""
        if self.mirror is not None:
            await self.mirror.settle()

    async def end_requests(self, server: VllmClient) -> None:
        """Close the connections to a server, so that requests under way end; their senders then choose another server."""
        self._mirror("end_requests", server)
        await server.close()

    def admit(self, server: VllmClient) -> None:
        """Let a server whose weights are verified receive requests."""
        self._mirror("admit", server)
        self._admitted.add(server)
        self._is_open.set()
        if occupancy := self._occupancies.get(server):
            occupancy.look()
        elif lane := current_lane():
            is_admitted = partial(self._admitted.__contains__, server)
            self._occupancies[server] = Occupancy(server.url, lane.recorder, is_admitted, self._client)
        if unverified := self._unverified.pop(server, None):
            _decide(unverified, is_right=True)

    def mark_unverified(self, server: VllmClient, version: str) -> None:
        """Declare that a server may already sample with the weights `version`, which are not verified yet.

        Responses with these weights wait (`require_verified`) until the server is admitted; they fail if it is removed or
        its weights are rejected.
        """
        self.reject(server)
        self._mirror("mark_unverified", server, version)
        self._unverified[server] = version, asyncio.get_running_loop().create_future()

    def reject(self, server: VllmClient) -> None:
        """Declare the unverified weights of a server wrong: responses with them fail."""
        if unverified := self._unverified.get(server):
            self._mirror("reject", server)
            _decide(unverified, is_right=False)

    async def require_verified(self, server: VllmClient, versions: Collection[str]) -> None:
        """Wait until the weights behind a response are verified.

        Args:
            server: the server that responded.
            versions: names of the weights that sampled the response.

        Raises:
            TransientRequestError: the weights were rejected; another server may respond.
        """
        version, verdict = self._unverified.get(server, ("", None))
        if verdict is None or version not in versions:
            return
        with span("waiting_for_server", cause="parity"):
            # All responses of the server wait for this future: one that is cancelled must not cancel it.
            is_right = await asyncio.shield(verdict)
        if not is_right:
            raise TransientRequestError(f"{server.url}: its weights {version} could not be verified")

    def remove(self, server: VllmClient) -> None:
        """Send no more requests to a server; its groups choose another server, or wait for one."""
        self.reject(server)
        if server not in self._admitted:
            return
        self._mirror("remove", server)
        self._counts["removals"] += 1
        self._admitted.discard(server)
        if occupancy := self._occupancies.get(server):
            occupancy.look()
        if not self._admitted:
            self._is_open.clear()
        self._server_of_group = {
            group: chosen for group, chosen in self._server_of_group.items() if chosen is not server
        }

    def note_failure(self, server: VllmClient, error: TransientRequestError) -> None:
        """Count a failed request, and have the server's watcher check the server at once.

        A server that lost a connection, or failed many requests in a row, is removed until its watcher readmits it.
        """
        self._failures_in_a_row[server] += 1
        # A lost connection is the sign of a dead server; a single other failure is not.
        if isinstance(error, ConnectionLostError) or self.is_suspect(server):
            self.remove(server)
        self.alarm(server).set()

    def take_alarm(self, url: str, *, is_out: bool) -> None:
        """Have a server's watcher check it, since requests of another process failed; `is_out`: so that it is removed and suspect."""
        for server in [each for each in {*self._alarms, *self._admitted} if each.url == url]:
            if is_out:
                self._failures_in_a_row[server] = server.max_failures_in_a_row
                self.remove(server)
            self.alarm(server).set()

    def note_success(self, server: VllmClient) -> None:
        """Reset the count of a server's failed requests in a row."""
        self._failures_in_a_row.pop(server, None)

    def is_suspect(self, server: VllmClient) -> bool:
        """Return True if a server failed `ClientLimits.max_failures_in_a_row` requests since its last success."""
        return self._failures_in_a_row[server] >= server.max_failures_in_a_row

    def alarm(self, server: VllmClient) -> asyncio.Event:
        """Return the event that is set when a request to a server fails; the server's watcher clears it."""
        return self._alarms.setdefault(server, asyncio.Event())

    def forget(self, group: int) -> None:
        """Forget which server was chosen for a group whose requests are finished."""
        self._server_of_group.pop(group, None)

    def metrics(self) -> list[Metric]:
        """Return the requests, retries, removals of servers and peak of outstanding tokens since the last call.

        The number of servers now in the pool is among them.
        """
        counts = {name: float(self._counts[name]) for name in ("requests", "retries", "removals")}
        counts["servers"] = float(len(self._admitted))
        largest = Metric("serve/outstanding_tokens", ALL, "max", float(self._max_outstanding))
        self._counts.clear()
        self._max_outstanding = self._outstanding_tokens.total()
        return [*(Metric(f"serve/{name}", ALL, "value", value) for name, value in counts.items()), largest]

    @asynccontextmanager
    async def lease(
        self, group: int, n_tokens: int, avoid: Collection[VllmClient] = ()
    ) -> AsyncIterator[VllmClient]:
        """Choose the server for a group's request, which counts as `n_tokens` outstanding tokens until the block ends.

        Waits while the pool is empty.

        Args:
            group: number of the group, which keeps its server unless that is in `avoid`.
            n_tokens: largest number of tokens of prompt and completion.
            avoid: servers that failed this request; the group moves to another one if there is any.
        """
        if not self._admitted:
            with span("waiting_for_server", cause="no server"):
                # The pool may be empty again before this task continues.
                while not self._admitted:
                    await self._is_open.wait()
        server = self._choose_server(group, avoid)
        self._counts["requests"] += 1
        self._counts["retries"] += bool(avoid)
        self._outstanding_tokens[server] += n_tokens
        self._max_outstanding = max(self._max_outstanding, self._outstanding_tokens.total())
        if occupancy := self._occupancies.get(server):
            occupancy.begin_request()
        try:
            yield server
        finally:
            self._outstanding_tokens[server] -= n_tokens
            if occupancy:
                occupancy.end_request()

    def _choose_server(self, group: int, avoid: Collection[VllmClient]) -> VllmClient:
        # The samples of a group share their prompt, whose keys and values its server has in its prefix cache.
        own = self._server_of_group.get(group)
        if own is not None and own not in avoid:
            return own
        candidates = [each for each in self._admitted if each not in avoid] or self._admitted
        server = min(candidates, key=lambda each: (self._outstanding_tokens[each], each.url))
        self._server_of_group[group] = server
        return server


def _decide(unverified: tuple[str, asyncio.Future[bool]], *, is_right: bool) -> None:
    _, verdict = unverified
    if not verdict.done():
        verdict.set_result(is_right)
