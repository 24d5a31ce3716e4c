"""One server's part of a transfer: a thread for each of its links, so that it holds nobody but itself."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tasks.errors import SyncError
from tasks.sync.filling import Board
from tasks.sync.link import SendingLink, all_cores


class Delivery:
    """Sends all buckets of a rank to one server.

    Args:
        links: to its workers, by whether they are open.
        sizes: bytes of each bucket.
        board: where they appear.
        ended: called once when all threads are done, from one of them.

    Attributes:
        error: why it was given up; empty while it was not.
        ended_at: of the monotonic clock.
    """

    def __init__(
        self,
        links: Mapping[SendingLink, bool],
        sizes: Sequence[int],
        board: Board,
        ended: Callable[["Delivery"], None],
    ) -> None:
        self.error = ""
        self.ended_at = 0.0
        self._links, self._sizes, self._board, self._ended = links, sizes, board, ended
        self._sent = dict.fromkeys(links, 0)
        self._running, self._lock = len(links), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(link,), daemon=True) for link in links]

    def start(self) -> None:
        """Begin."""
        with all_cores():
            for thread in self._threads:
                thread.start()

    @property
    def sent_bytes(self) -> int:
        """What has been handed over to the worker that has least."""
        return min(self._sent.values())

    def give_up(self, reason: str) -> None:
        """Drop all links."""
        with self._lock:
            if self.error:
                return
            so_far = f"{self.sent_bytes / 1e6:.1f} of {sum(self._sizes) / 1e6:.1f} MB had gone"
            self.error = f"{reason}; {so_far}"
        for link in self._links:
            link.close()

    def join(self) -> None:
        """Wait until no thread reads weights any more."""
        for thread in self._threads:
            thread.join()

    def _run(self, link: SendingLink) -> None:
        try:
            if not self._links[link]:
                link.open()
            for number, size in enumerate(self._sizes):
                link.send(self._board.wait(number))
                self._sent[link] += size
        except (SyncError, OSError, RuntimeError) as error:
            self.give_up(str(error))
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if is_last:
            self.ended_at = time.monotonic()
            self._ended(self)
