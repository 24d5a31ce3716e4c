"""One server's transfer, over links that are planted."""

import queue
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.link import Stalls
from rollmill.tasks.sync.server_transfer import ServerTransfer


class FailingLink:
    """A link whose first bucket raises."""

    def __init__(self, error: Exception) -> None:
        self.stalls, self.is_closed, self._error = Stalls(), False, error

    def open(self) -> None:
        pass

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        raise self._error

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("error", [SyncError("broken"), ValueError("odd"), KeyError()])
def test_any_exception_of_a_link_ends_the_transfer_and_closes_its_links(error: Exception) -> None:
    link = FailingLink(error)
    ready: Future[Sequence[torch.Tensor]] = Future()
    ready.set_result([torch.zeros(4, dtype=torch.uint8)])
    ended = queue.SimpleQueue[ServerTransfer]()
    transfer = ServerTransfer({link: False}, 1, [4], [ready], ended.put)

    transfer.start()
    transfer.join()

    assert ended.get(timeout=10.0) is transfer
    assert transfer.error.startswith(str(error) or "KeyError")
    assert link.is_closed
    assert transfer.sent_bytes == 0
