"""What a sync of one version to the servers came to: a report for each, metrics of all, and a line while it goes on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.ui.progress import say
from tasks.observe.metrics import Metric


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One server's sync.

    Attributes:
        sent_bytes: to each of its workers; 0 when only the version's name was sent.
        transfer_s: seconds until the last byte was there.
        held_s: seconds that its requests were held.
        parity_s: seconds that the comparison took.
        verify_s: seconds that the comparison of all its weights took; 0 when it was not due.
        difference: largest difference in log-probability to the trainer, in nats; NaN when not compared.
    """

    server: str
    sent_bytes: int = 0
    transfer_s: float = 0.0
    held_s: float = 0.0
    parity_s: float = 0.0
    difference: float = float("nan")
    verify_s: float = 0.0


def sync_metrics(reports: Sequence[SyncReport], calls: int) -> list[Metric]:
    """Of one version's sync to all servers: bytes to all of them together, else of the server with the most.

    Args:
        reports: a server each.
        calls: commands to the trainer and requests to servers.
    """
    values = {
        "sync/sent_bytes": float(sum(report.sent_bytes for report in reports)),
        "sync/servers": float(len(reports)),
        "sync/transfer_s": max((report.transfer_s for report in reports), default=0.0),
        "sync/held_s": max((report.held_s for report in reports), default=0.0),
        "sync/parity_s": max((report.parity_s for report in reports), default=0.0),
        "sync/verify_s": max((report.verify_s for report in reports), default=0.0),
        "sync/logprob_difference": max((report.difference for report in reports), default=float("nan")),
        "sync/control_calls": float(calls),
    }
    return [Metric(name, "all", "value", value) for name, value in values.items()]


def progress_line(version: int, sent: Mapping[str, int], each_bytes: int, elapsed_s: float) -> str:
    """How far a transfer is, in words.

    Args:
        version: the policy version's number.
        sent: bytes so far, by server.
        each_bytes: that each server is to get.
        elapsed_s: seconds since it began.
    """
    whole = f"{sum(sent.values()) / 1e9:.1f} of {each_bytes * len(sent) / 1e9:.1f} GB"
    by_server = ", ".join(f"{server}: {n_bytes / 1e9:.1f} GB" for server, n_bytes in sent.items())
    return f"version {version} -> {len(sent)} servers: {whole}, {elapsed_s:.0f} s ({by_server})"


class RouteReport:
    """Says how weights reach servers: a line for all that they reach in one way, and nothing that was said before."""

    def __init__(self) -> None:
        self._ways: dict[str, str] = {}
        self._untold: set[str] = set()

    def note(self, server: str, transport: str, reason: str) -> None:
        """Note the way to a server; it is said with the next `tell` where it is new."""
        way = f"weights travel by {transport}, since {reason}"
        if self._ways.get(server) != way:
            self._ways[server] = way
            self._untold.add(server)

    def tell(self) -> None:
        """Say what is new."""
        servers: dict[str, list[str]] = defaultdict(list)
        for server, way in self._ways.items():
            if server in self._untold:
                servers[way].append(server)
        self._untold.clear()
        for way, of_one_way in servers.items():
            say(route_line(way, of_one_way))


def route_line(way: str, servers: Sequence[str]) -> str:
    """A way and its servers, in words. Example: "64 servers, http://a and 63 more: weights travel by tcp, since ..."."""
    if len(servers) == 1:
        return f"server {servers[0]}: {way}"
    return f"{len(servers)} servers, {servers[0]} and {len(servers) - 1} more: {way}"
