"""Spreads requests over the servers that are at the current version."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tasks.serve.client import VllmClient


class ServerPool:
    """The servers that may be asked; a group's server is chosen once, by least outstanding tokens.

    Requests wait while there is none: bringing one back, or ending the run, is up to who watches over them.
    """

    def __init__(self) -> None:
        self._outstanding_tokens: Counter[VllmClient] = Counter()
        self._admitted: set[VllmClient] = set()
        self._server_of_group: dict[int, VllmClient] = {}
        self._changed = asyncio.Condition()

    async def admit(self, server: VllmClient) -> None:
        """Let a server be asked."""
        async with self._changed:
            self._admitted.add(server)
            self._changed.notify_all()

    def set_aside(self, server: VllmClient) -> None:
        """Ask a server no more; its groups choose another, or wait."""
        self._admitted.discard(server)
        self._server_of_group = {
            group: chosen for group, chosen in self._server_of_group.items() if chosen is not server
        }

    def forget_groups(self) -> None:
        """Forget which server serves which group; call it when a step is over."""
        self._server_of_group.clear()

    @asynccontextmanager
    async def lease(self, group: int, n_tokens: int) -> AsyncIterator[VllmClient]:
        """The group's server, while a request of at most `n_tokens` tokens is under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._admitted)
        server = self._server_of_group.get(group)
        if server is None:
            server = min(self._admitted, key=lambda each: (self._outstanding_tokens[each], each.url))
            self._server_of_group[group] = server
        self._outstanding_tokens[server] += n_tokens
        try:
            yield server
        finally:
            self._outstanding_tokens[server] -= n_tokens
