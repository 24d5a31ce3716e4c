"""How far all ranks together are with what they send: each tells it now and then by way of a store, rank 0 adds it up."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

Sending = Callable[[], Mapping[str, int]]
"""Bytes that have gone to each server by now."""


class SendProgress:
    """The progress of the transfer that is under way; one on each rank.

    Args:
        store: a connection of its own to the ranks' store.
        rank: this rank.
        world_size: ranks.
        every_s: seconds between two times that a rank tells how far it is.
    """

    def __init__(self, store: Store, rank: int, world_size: int, every_s: float) -> None:
        self._store, self._every_s = store, every_s
        self._keys = [f"sent/{each}" for each in range(world_size)]
        self._own = self._keys[rank]

    @contextmanager
    def telling(self, sent: Sending) -> Iterator[None]:
        """Tell what `sent` says as long as this is open."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(self._every_s):
                self._store.set(self._own, json.dumps(dict(sent())))

        teller = threading.Thread(target=tell, name="send progress", daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()
            self._store.delete_key(self._own)

    def total(self) -> dict[str, int]:
        """Bytes by all ranks to each server, as each told it last; empty before they did."""
        total = Counter[str]()
        for key in self._keys:
            if self._store.check([key]):
                total.update(json.loads(self._store.get(key)))
        return dict(total)
