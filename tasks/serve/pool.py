"""Spreads requests over the servers that are at the current version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from tasks.errors import ConnectionLostError, TransientRequestError
from tasks.observe.metrics import ALL, Metric
from tasks.observe.spans import current_lane, span
from tasks.serve.client import VllmClient
from tasks.serve.occupancy import Occupancy


class Authority(Protocol):
    """Who knows more of the servers than a pool that follows it: the pool of the run, in another process."""

    async def vouch(self, url: str, versions: Collection[str], cuts: int) -> None:
        """As ServerPool.vouch, of the server at an address."""

    def report(self, url: str, error: TransientRequestError) -> None:
        """As ServerPool.report, of the server at an address."""


class ServerPool:
    """The servers that may be asked; a group keeps its server, chosen by least outstanding tokens.

    All of them serve the policy, whatever deployments they belong to. Requests wait while there is none:
    bringing one back, or ending the run, is up to who watches over them.

    Args:
        authority: whose word counts, of a pool in another process than who watches over the servers.

    Attributes:
        on_change: called after each change of what servers may be asked, or of what they are known to be.
    """

    def __init__(self, authority: Authority | None = None) -> None:
        self.on_change: Callable[[], None] = _nothing
        self._authority = authority
        self._cuts: Counter[VllmClient] = Counter()
        self._outstanding_tokens: Counter[VllmClient] = Counter()
        self._admitted: set[VllmClient] = set()
        self._server_of_group: dict[int, VllmClient] = {}
        self._is_open = asyncio.Event()
        self._doubts: dict[VllmClient, tuple[str, asyncio.Future[bool]]] = {}
        self._failures_in_a_row: Counter[VllmClient] = Counter()
        self._alarms: dict[VllmClient, asyncio.Event] = {}
        self._occupancies: dict[VllmClient, Occupancy] = {}
        self._counts: Counter[str] = Counter()
        self._most_outstanding = 0

    def admit(self, server: VllmClient) -> None:
        """Let a server be asked; the weights that it has are right."""
        self._admitted.add(server)
        self._is_open.set()
        self._observe(server)
        if doubt := self._doubts.pop(server, None):
            _decide(doubt, is_right=True)
        self.on_change()

    def _observe(self, server: VllmClient) -> None:
        """Book a server's seconds from now on."""
        if occupancy := self._occupancies.get(server):
            occupancy.look()
        elif lane := current_lane():
            is_admitted = partial(self._admitted.__contains__, server)
            self._occupancies[server] = Occupancy(server.url, lane.recorder, is_admitted)

    def doubt(self, server: VllmClient, version: str) -> None:
        """Requests to a server may go on with weights of that name, which have yet to be compared.

        Their answers wait until it is let in (`admit`), and are lost when it is set aside, or distrusted, instead.
        """
        self.distrust(server)
        self._doubts[server] = version, asyncio.get_running_loop().create_future()

    def distrust(self, server: VllmClient) -> None:
        """The weights that were in doubt are wrong, or nobody will know."""
        if (doubt := self._doubts.get(server)) and not doubt[1].done():
            _decide(doubt, is_right=False)
            self._cuts[server] += 1
            self.on_change()

    async def vouch(self, server: VllmClient, versions: Collection[str], cuts: int = 0) -> None:
        """Wait until the weights that gave an answer are known to be right.

        Args:
            server: that gave it.
            versions: names of the weights.
            cuts: what `cuts` said when the request was sent, for an authority; here a cut ends requests.

        Raises:
            TransientRequestError: they are not.
        """
        if self._authority is not None:
            await self._authority.vouch(server.url, versions, cuts)
            return
        version, verdict = self._doubts.get(server, ("", None))
        if verdict is None or version not in versions:
            return
        with span("waiting_for_server", cause="parity"):
            is_right = await asyncio.shield(verdict)
        if not is_right:
            raise TransientRequestError(f"{server.url}: its weights {version} are not known to be right")

    async def vouch_to_follower(self, server: VllmClient, versions: Collection[str], cuts: int) -> None:
        """As `vouch`, of an answer to a pool that follows this one, whose requests no cut has ended."""
        await self.vouch(server, versions)
        if self.cuts(server) != cuts:
            raise TransientRequestError(f"{server.url}: it was set aside while it answered")

    def cuts(self, server: VllmClient) -> int:
        """How often a server was set aside or distrusted: what it answers across a cut need not be by right weights."""
        return self._cuts[server]

    def states(self) -> dict[str, tuple[bool, int]]:
        """Of each server that was ever let in, by its address: whether it may be asked, and its cuts."""
        return {each.url: (each in self._admitted, self._cuts[each]) for each in self.known()}

    def known(self) -> set[VllmClient]:
        """Every server that was ever let in or set aside."""
        return {*self._admitted, *self._cuts}

    def follow(self, server: VllmClient, *, is_admitted: bool, cuts: int) -> None:
        """Take over what the authority says of a server."""
        self._cuts[server] = cuts
        if is_admitted:
            self.admit(server)
        else:
            self.set_aside(server)
            self._cuts[server] = cuts

    def set_aside(self, server: VllmClient) -> None:
        """Ask a server no more; its groups choose another, or wait."""
        self.distrust(server)
        self._cuts[server] += 1
        if server not in self._admitted:
            return
        self._counts["set_aside"] += 1
        self._admitted.discard(server)
        if occupancy := self._occupancies.get(server):
            occupancy.look()
        if not self._admitted:
            self._is_open.clear()
        self._server_of_group = {
            group: chosen for group, chosen in self._server_of_group.items() if chosen is not server
        }
        self.on_change()

    def report(self, server: VllmClient, error: TransientRequestError) -> None:
        """Tell of a request that failed: who watches over the server looks at once.

        One whose connection was lost, or that fails one request after the other, is set aside until then.
        """
        if self._authority is not None:
            self._authority.report(server.url, error)
            return
        self._failures_in_a_row[server] += 1
        if isinstance(error, ConnectionLostError) or self.is_suspect(server):
            self.set_aside(server)
        self.alarm(server).set()

    def answered(self, server: VllmClient) -> None:
        """Tell of a request that a server answered: its failures in a row are over."""
        self._failures_in_a_row.pop(server, None)

    def is_suspect(self, server: VllmClient) -> bool:
        """True when a server has failed `serve.max_failures_in_a_row` requests since it last answered one."""
        return self._failures_in_a_row[server] >= server.max_failures_in_a_row

    def alarm(self, server: VllmClient) -> asyncio.Event:
        """Set when a request to a server has failed; cleared by who watches over it."""
        return self._alarms.setdefault(server, asyncio.Event())

    def forget(self, group: int) -> None:
        """Forget which server serves a group; call it when the group is over."""
        self._server_of_group.pop(group, None)

    def metrics(self) -> list[Metric]:
        """What happened since the last call: requests, those that were sent again, servers set aside.

        `outstanding_tokens` is the most that all servers together had been asked for at one moment.
        """
        counts = {name: float(self._counts[name]) for name in ("requests", "retries", "set_aside")}
        counts["servers"] = float(len(self._admitted))
        largest = Metric("serve/outstanding_tokens", ALL, "max", float(self._most_outstanding))
        self._counts.clear()
        self._most_outstanding = self._outstanding_tokens.total()
        return [*(Metric(f"serve/{name}", ALL, "value", value) for name, value in counts.items()), largest]

    @asynccontextmanager
    async def lease(
        self, group: int, n_tokens: int, avoid: Collection[VllmClient] = ()
    ) -> AsyncIterator[VllmClient]:
        """The group's server, while a request of at most `n_tokens` tokens is under way.

        Args:
            group: keeps the server that is chosen for it, as long as it need not be avoided.
            n_tokens: prompt and completion.
            avoid: servers that failed this request; the group moves to another when there is one.
        """
        if not self._admitted:
            with span("waiting_for_server", cause="no server"):
                while not self._admitted:
                    await self._is_open.wait()
        server = self._chosen(group, avoid)
        self._counts["requests"] += 1
        self._counts["retries"] += bool(avoid)
        self._outstanding_tokens[server] += n_tokens
        self._most_outstanding = max(self._most_outstanding, self._outstanding_tokens.total())
        if occupancy := self._occupancies.get(server):
            occupancy.asked()
        try:
            yield server
        finally:
            self._outstanding_tokens[server] -= n_tokens
            if occupancy:
                occupancy.answered()

    def _chosen(self, group: int, avoid: Collection[VllmClient]) -> VllmClient:
        own = self._server_of_group.get(group)
        if own is not None and own not in avoid:
            return own
        candidates = [each for each in self._admitted if each not in avoid] or self._admitted
        server = min(candidates, key=lambda each: (self._outstanding_tokens[each], each.url))
        self._server_of_group[group] = server
        return server


def _nothing() -> None:
    """Nobody wants to know of changes."""


def _decide(doubt: tuple[str, asyncio.Future[bool]], *, is_right: bool) -> None:
    _, verdict = doubt
    if not verdict.done():
        verdict.set_result(is_right)
