"""Spreads requests over the servers that are at the current version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from tasks.errors import ConnectionLostError, TransientRequestError
from tasks.observe.metrics import ALL, Metric
from tasks.serve.client import VllmClient


class ServerPool:
    """The servers that may be asked; a group keeps its server, chosen by least outstanding tokens.

    All of them serve the policy, whatever deployments they belong to. Requests wait while there is none:
    bringing one back, or ending the run, is up to who watches over them.
    """

    def __init__(self) -> None:
        self._outstanding_tokens: Counter[VllmClient] = Counter()
        self._admitted: set[VllmClient] = set()
        self._server_of_group: dict[int, VllmClient] = {}
        self._is_open = asyncio.Event()
        self._doubts: dict[VllmClient, tuple[str, asyncio.Future[bool]]] = {}
        self._failures_in_a_row: Counter[VllmClient] = Counter()
        self._alarms: dict[VllmClient, asyncio.Event] = {}
        self._counts: Counter[str] = Counter()
        self._most_outstanding = 0

    def admit(self, server: VllmClient) -> None:
        """Let a server be asked; the weights that it has are right."""
        self._admitted.add(server)
        self._is_open.set()
        if doubt := self._doubts.pop(server, None):
            _decide(doubt, is_right=True)

    def doubt(self, server: VllmClient, version: str) -> None:
        """Requests to a server may go on with weights of that name, which have yet to be compared.

        Their answers wait until it is let in (`admit`), and are lost when it is set aside, or distrusted, instead.
        """
        self.distrust(server)
        self._doubts[server] = version, asyncio.get_running_loop().create_future()

    def distrust(self, server: VllmClient) -> None:
        """The weights that were in doubt are wrong, or nobody will know."""
        if doubt := self._doubts.get(server):
            _decide(doubt, is_right=False)

    async def vouch(self, server: VllmClient, versions: Collection[str]) -> None:
        """Wait until the weights that gave an answer are known to be right.

        Args:
            server: that gave it.
            versions: names of the weights.

        Raises:
            TransientRequestError: they are not.
        """
        version, verdict = self._doubts.get(server, ("", None))
        if verdict is not None and version in versions and not await asyncio.shield(verdict):
            raise TransientRequestError(f"{server.url}: its weights {version} are not known to be right")

    def set_aside(self, server: VllmClient) -> None:
        """Ask a server no more; its groups choose another, or wait."""
        self.distrust(server)
        if server not in self._admitted:
            return
        self._counts["set_aside"] += 1
        self._admitted.discard(server)
        if not self._admitted:
            self._is_open.clear()
        self._server_of_group = {
            group: chosen for group, chosen in self._server_of_group.items() if chosen is not server
        }

    def report(self, server: VllmClient, error: TransientRequestError) -> None:
        """Tell of a request that failed: who watches over the server looks at once.

        One whose connection was lost, or that fails one request after the other, is set aside until then.
        """
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
        while not self._admitted:
            await self._is_open.wait()
        server = self._chosen(group, avoid)
        self._counts["requests"] += 1
        self._counts["retries"] += bool(avoid)
        self._outstanding_tokens[server] += n_tokens
        self._most_outstanding = max(self._most_outstanding, self._outstanding_tokens.total())
        try:
            yield server
        finally:
            self._outstanding_tokens[server] -= n_tokens

    def _chosen(self, group: int, avoid: Collection[VllmClient]) -> VllmClient:
        own = self._server_of_group.get(group)
        if own is not None and own not in avoid:
            return own
        candidates = [each for each in self._admitted if each not in avoid] or self._admitted
        server = min(candidates, key=lambda each: (self._outstanding_tokens[each], each.url))
        self._server_of_group[group] = server
        return server


def _decide(doubt: tuple[str, asyncio.Future[bool]], *, is_right: bool) -> None:
    _, verdict = doubt
    if not verdict.done():
        verdict.set_result(is_right)
