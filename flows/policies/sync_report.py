"""The outcome of a weight sync: a report for each server, metrics, a progress line, and the verdict of a full comparison."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.sync.weight_messages import WeightUpdateResponse
from rollmill.tasks.sync.weight_parity import NOT_COMPARED, LogprobDifferences, find_differing_names

DIFFERENCE_MEAN, DIFFERENCE_HIGH = "sync/logprob_difference_mean", "sync/logprob_difference_p99"
"""Metrics of a sync, from which a resumed run knows the usual differences."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Bytes, seconds and parity of one server's weight sync.

    Attributes:
        server: its address.
        sent_bytes: to each of its workers; 0 if only the version's name was sent.
        whole_bytes: size of the weights, which is more if only their changes were sent; 0 as above.
        transfer_s: seconds until the last byte had arrived.
        held_s: seconds for which its requests were held.
        parity_s: seconds of the comparison with the trainer.
        verify_s: seconds of the comparison of all weights; 0 if it was not due.
        differences: in log-probability from the trainer, in nats; NaN if not compared.
        slope: how far the update moved the server's log-probabilities, as a multiple of the trainer's movement; NaN if not measured.
        alarmed: True if its log-probabilities looked wrong, though its weights are the trainer's.
    """

    server: str
    sent_bytes: int = 0
    transfer_s: float = 0.0
    held_s: float = 0.0
    parity_s: float = 0.0
    differences: LogprobDifferences = NOT_COMPARED
    verify_s: float = 0.0
    slope: float = math.nan
    alarmed: bool = False
    whole_bytes: int = 0


def sync_metrics(reports: Sequence[SyncReport], calls: int) -> list[Metric]:
    """Return metrics of a sync: bytes summed over servers, numbers of servers, alarms and calls, else the worst of all servers.

    There is a report for each server; `calls` are commands to the trainer and requests to servers.
    """
    sent, whole = sum(each.sent_bytes for each in reports), sum(each.whole_bytes for each in reports)
    values = {
        "sync/sent_bytes": float(sent),
        "sync/sent_share": sent / whole if whole else math.nan,
        "sync/servers": float(len(reports)),
        "sync/transfer_s": max((report.transfer_s for report in reports), default=0.0),
        "sync/held_s": max((report.held_s for report in reports), default=0.0),
        "sync/parity_s": max((report.parity_s for report in reports), default=0.0),
        "sync/verify_s": max((report.verify_s for report in reports), default=0.0),
        "sync/logprob_difference": max(
            _known(each.differences.largest for each in reports), default=math.nan
        ),
        DIFFERENCE_MEAN: max(_known(each.differences.mean for each in reports), default=math.nan),
        DIFFERENCE_HIGH: max(_known(each.differences.high for each in reports), default=math.nan),
        "sync/logprob_slope": min(_known(each.slope for each in reports), default=math.nan),
        "sync/parity_alarms": float(sum(report.alarmed for report in reports)),
        "sync/control_calls": float(calls),
    }
    return [Metric(name, "all", "value", value) for name, value in values.items()]


def _known(values: Iterable[float]) -> Iterator[float]:
    """Leave out NaN: of a server that only got a version's name, nothing was compared."""
    return (value for value in values if not math.isnan(value))


def progress_line(version: int, sent: Mapping[str, int], each_bytes: int, elapsed_s: float) -> str:
    """Return a log line with the progress of a transfer of weights.

    Args:
        version: number of the policy version.
        sent: bytes sent so far, by server.
        each_bytes: bytes that each server gets.
        elapsed_s: seconds since the transfer began.
    """
    whole = f"{sum(sent.values()) / 1e9:.1f} of {each_bytes * len(sent) / 1e9:.1f} GB"
    by_server = ", ".join(f"{server}: {n_bytes / 1e9:.1f} GB" for server, n_bytes in sent.items())
    return f"version {version} -> {len(sent)} servers: {whole}, {elapsed_s:.0f} s ({by_server})"


class RouteReport:
    """Logs how weights reach servers: one line for all servers with the same route, and no route twice."""

    def __init__(self) -> None:
        self._ways: dict[str, str] = {}
        self._unlogged: set[str] = set()

    def note(self, server: str, transport: str, reason: str) -> None:
        """Keep by which transport weights reach a server, and why; the next `log_new_routes` logs it if it is new."""
        way = f"weights travel by {transport}, since {reason}"
        if self._ways.get(server) != way:
            self._ways[server] = way
            self._unlogged.add(server)

    def log_new_routes(self) -> None:
        """Log the transport, and its reason, of each server whose transport or reason changed since the last call, or is new.

        Servers with the same transport and reason share a line.
        """
        servers: dict[str, list[str]] = defaultdict(list)
        for server, way in self._ways.items():
            if server in self._unlogged:
                servers[way].append(server)
        self._unlogged.clear()
        for way, of_one_way in servers.items():
            others = f" and {len(of_one_way) - 1} more" if len(of_one_way) > 1 else ""
            whom = (
                f"{len(of_one_way)} servers, {of_one_way[0]}{others}" if others else f"server {of_one_way[0]}"
            )
            # One line for all: hundreds of servers would fill the log.
            say(f"{whom}: {way}")


MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class SyncVerdict:
    """The result of comparing all of a server's weights with the trainer's.

    Attributes:
        server: its address.
        tensors: number of tensors sent and compared.
        bytes: received by each of its workers.
        changed: tensors that differ on arrival.
        stale: modules of the live model that differ from a model with these weights.
    """

    server: str
    tensors: int
    bytes: int
    changed: tuple[str, ...]
    stale: tuple[str, ...]

    @classmethod
    def of(cls, server: str, answer: WeightUpdateResponse, sent: Mapping[str, str]) -> "SyncVerdict":
        """Compare the checksums in a server's response in mode verify with `sent`, the trainer's SHA-256 by tensor name."""
        changed = find_differing_names(sent, answer.checksums)
        return cls(server, len(sent), answer.bytes, changed, tuple(answer.differing))

    @property
    def differing(self) -> tuple[str, ...]:
        """Names of all that differs, for a message: changed tensors, then stale modules."""
        return (
            *(f"{name} (arrived otherwise)" for name in self.changed),
            *(f"{name} (live)" for name in self.stale),
        )


def verdict_table(verdicts: Sequence[SyncVerdict]) -> Table:
    """Return a table with a row for each server: tensors, megabytes, and the number of differences."""
    table = Table()
    table.add_column("server", overflow="fold")
    for heading in ("tensors", "megabytes", "differing"):
        table.add_column(heading, justify="right")
    for each in verdicts:
        cells = (str(each.tensors), f"{each.bytes / MEGABYTE:.1f}", str(len(each.differing)))
        table.add_row(Text(each.server), *cells)
    return table
