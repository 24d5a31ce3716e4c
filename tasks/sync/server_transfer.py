"""The transfer to one server, a thread for each link, and how the writer of buckets waits for transfers."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rollmill.tasks.observe.spans import add_short_span
from rollmill.tasks.sync.bucket_writer import ReadyBucket
from rollmill.tasks.sync.changed_buckets import encode_head
from rollmill.tasks.sync.links.link import SendingLink, use_all_cores


class ServerTransfer:
    """Sends all buckets of one trainer rank to one server, with a thread for each link.

    Args:
        links: [workers * streams], each True if it is open already.
        streams: links to each worker, which carry buckets in turn.
        sizes: bytes of each bucket.
        ready: futures of the buckets' bytes.
        on_end: called once, in a thread of the transfer, when all of its threads are done.
        on_taken: called in a thread of the transfer each time that a link has taken a bucket, or will take no more.
        is_changes: whether the buckets are whole or the changes of them, which their heads announce; None: whole, without heads.

    Attributes:
        error: why the transfer was given up; empty if it was not.
        ended_at: end of the link that ended last, in seconds of `time.monotonic`.
        stalls: intervals (`time.perf_counter_ns`) in which the link that ended last waited for the server.
    """

    def __init__(
        self,
        links: Mapping[SendingLink, bool],
        streams: int,
        sizes: Sequence[int],
        ready: Sequence[ReadyBucket],
        on_end: Callable[["ServerTransfer"], None],
        on_taken: Callable[[], None] = lambda: None,
        *,
        is_changes: bool | None = None,
    ) -> None:
        self.error = ""
        self.ended_at = 0.0
        self.stalls: list[tuple[int, int]] = []
        self._links, self._sizes, self._ready, self._on_end = links, sizes, ready, on_end
        self._on_taken = on_taken
        self._streams = streams
        self._is_changes = is_changes
        self._sent, self._carried = [0] * len(links), [0] * len(links)
        # Number of the bucket that each link takes next.
        self._next = [number % streams for number in range(len(links))]
        self._running, self._lock = len(links), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(links)
        ]

    def start(self) -> None:
        """Start the threads that send."""
        with use_all_cores():
            for thread in self._threads:
                thread.start()

    @property
    def sent_bytes(self) -> int:
        """Number of the weights' bytes that the worker with the fewest has so far, sent as such or as changes."""
        return self._least(self._sent)

    @property
    def carried_bytes(self) -> int:
        """Number of bytes that travelled so far to the worker that has received the fewest."""
        return self._least(self._carried)

    def _least(self, by_link: Sequence[int]) -> int:
        firsts = range(0, len(by_link), self._streams)
        return min(sum(by_link[first : first + self._streams]) for first in firsts)

    def has_taken(self, bucket: int) -> bool:
        """Return True if no link reads a bucket any more: each has sent it, or has ended."""
        return all(each > bucket for each in self._next[bucket % self._streams :: self._streams])

    def give_up(self, reason: str) -> None:
        """Close all links and record the reason, unless the transfer was cancelled before."""
        with self._lock:
            if self.error:
                return
            so_far = f"{self.sent_bytes / 1e6:.1f} of {sum(self._sizes) / 1e6:.1f} MB had been sent"
            self.error = f"{reason}; {so_far}"
        for link in self._links:
            link.close()

    def join(self) -> None:
        """Wait until all threads have ended, so that none reads the weights any more."""
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, link: SendingLink) -> None:
        try:
            link.stalls.take()
            if not self._links[link]:
                with link.stalls.watch():
                    link.open()
            for bucket in range(number % self._streams, len(self._sizes), self._streams):
                parts = self._ready[bucket].result()
                n_bytes = sum(map(len, parts))
                if self._is_changes is not None:
                    link.send([encode_head(n_bytes, is_changes=self._is_changes)])
                link.send(parts)
                self._sent[number] += self._sizes[bucket]
                self._carried[number] += n_bytes
                self._next[number] = bucket + self._streams
                self._on_taken()
        except Exception as error:  # noqa: BLE001 - of any kind: a thread's error is lost, and the server's part would pass for sent
            self.give_up(str(error) or type(error).__name__)
        finally:
            self._next[number] = len(self._sizes) + self._streams
            self._on_taken()
            with self._lock:
                self._running -= 1
                is_last = not self._running
            if is_last:
                self.stalls = link.stalls.take()
                self.ended_at = time.monotonic()
                self._on_end(self)


WAITING_FOR_RECEIVER = "waiting_for_receiver"
"""In spans: a rank's wait for a server."""


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A deadline of a transfer, in seconds of `time.monotonic`, and the reason for giving up what exceeds it."""

    deadline: float
    reason: str


class BackPressure:
    """Lets the writer of buckets wait until servers have taken earlier ones, whose memory it writes again.

    Args:
        limit: of the whole transfer.
        straggler_timeout_s: seconds for which slower servers may hold up the others, in total.
        longest_wait_s: seconds for which they may at a time: less than the others wait for a byte.
    """

    def __init__(self, limit: TimeLimit, straggler_timeout_s: float, longest_wait_s: float) -> None:
        self._limit, self._straggler_timeout_s = limit, straggler_timeout_s
        self._longest_wait_s = longest_wait_s
        self._left_s = straggler_timeout_s
        self._taken = threading.Condition()

    def notify(self) -> None:
        """Wake the writer: a link has taken a bucket, or will take no more."""
        with self._taken:
            self._taken.notify_all()

    def await_taken(self, transfers: Mapping[str, ServerTransfer], buckets: Collection[int]) -> int:
        """Wait until no transfer reads one of the buckets any more; returns that bucket.

        Gives up the transfers that exceed a time limit. A link that stalls ends by its own limit.

        Args:
            transfers: to each server, by its address.
            buckets: numbers of buckets that are in memory.
        """
        oldest, started, slowest = min(buckets), time.perf_counter_ns(), ""
        until = float("inf")
        with self._taken:
            while not (free := [n for n in buckets if all(each.has_taken(n) for each in transfers.values())]):
                running = {server: each for server, each in transfers.items() if not each.error}
                slow = {server: each for server, each in running.items() if not each.has_taken(oldest)}
                slowest = next(iter(slow), slowest)
                others_wait = len(slow) < len(running)
                if others_wait:
                    # Counted from when the first server has taken the bucket: before, none waits for another.
                    until = min(until, time.monotonic() + self._longest_wait_s)
                self._wait_for(slow.values(), until, others_wait=others_wait)
        add_short_span(WAITING_FOR_RECEIVER, started, slowest)
        return free[0]

    def _wait_for(self, slow: Collection[ServerTransfer], until: float, *, others_wait: bool) -> None:
        """Wait for a call of `notify`, or give transfers up that have exceeded a time limit."""
        # Without any, the threads of transfers that were given up are about to end.
        if not slow:
            self._taken.wait()
            return
        started = time.monotonic()
        left_s, reason = self._limit.deadline - started, self._limit.reason
        if others_wait:
            in_total = self._left_s, f"other servers waited {self._straggler_timeout_s:g} s for it"
            at_a_time = until - started, f"other servers waited {self._longest_wait_s:g} s at a time for it"
            left_s, reason = min((left_s, reason), in_total, at_a_time)
        if left_s <= 0:
            for each in slow:
                each.give_up(reason)
            return
        self._taken.wait(left_s)
        if others_wait:
            self._left_s -= time.monotonic() - started
