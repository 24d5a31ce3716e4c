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
        links: [workers * streams] by whether they are open.
        streams: links to each worker, which take buckets in turn.
        sizes: bytes of each bucket.
        board: where they appear.
        ended: called once when all threads are done, from one of them.

    Attributes:
        error: why it was given up; empty while it was not.
        ended_at: of the monotonic clock.
        stalls: of the link that was done last: from when to when, by `time.perf_counter_ns`, the server took nothing.
    """

    def __init__(
        self,
        links: Mapping[SendingLink, bool],
        streams: int,
        sizes: Sequence[int],
        board: Board,
        ended: Callable[["Delivery"], None],
    ) -> None:
        self.error = ""
        self.ended_at = 0.0
        self.stalls: list[tuple[int, int]] = []
        self._links, self._sizes, self._board, self._ended = links, sizes, board, ended
        self._streams = streams
        self._sent = [0] * len(links)
        self._running, self._lock = len(links), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(links)
        ]

    def start(self) -> None:
        """Begin."""
        with all_cores():
            for thread in self._threads:
                thread.start()

    @property
    def sent_bytes(self) -> int:
        """What has been handed over to the worker that has least."""
        return min(
            sum(self._sent[first : first + self._streams])
            for first in range(0, len(self._sent), self._streams)
        )

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

    def _run(self, number: int, link: SendingLink) -> None:
        try:
            link.stalls.take()
            if not self._links[link]:
                with link.stalls.watched():
                    link.open()
            for bucket in range(number % self._streams, len(self._sizes), self._streams):
                link.send(self._board.wait(bucket))
                self._sent[number] += self._sizes[bucket]
        except (SyncError, OSError, RuntimeError) as error:
            self.give_up(str(error))
        finally:
            self._end(link)

    def _end(self, link: SendingLink) -> None:
        with self._lock:
            self._running -= 1
            is_last = not self._running
        if is_last:
            self.stalls = link.stalls.take()
            self.ended_at = time.monotonic()
            self._ended(self)
