"""What a server has of the trainer's weights, tensor by tensor: the verdict, and its table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from tasks.sync.checksums import differing_names
from tasks.sync.order import WeightAnswer

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class SyncVerdict:
    """How one server's weights compare with the trainer's.

    Attributes:
        server: its address.
        tensors: how many were sent and compared.
        bytes: that arrived at each of its workers.
        changed: tensors that arrived otherwise than they were sent.
        stale: what the live model computes with and a model that is loaded with these weights has otherwise.
    """

    server: str
    tensors: int
    bytes: int
    changed: tuple[str, ...]
    stale: tuple[str, ...]

    @classmethod
    def of(cls, server: str, answer: WeightAnswer, sent: Mapping[str, str]) -> "SyncVerdict":
        """From a server's answer to an order of mode verify, and the trainer's SHA-256 by tensor."""
        changed = differing_names(sent, answer.checksums)
        return cls(server, len(sent), answer.bytes, changed, tuple(answer.differing))

    @property
    def differing(self) -> tuple[str, ...]:
        """Names of all that differs, for a message: what arrived otherwise, then what is stale."""
        return (
            *(f"{name} (arrived otherwise)" for name in self.changed),
            *(f"{name} (live)" for name in self.stale),
        )


def table_of(verdicts: Sequence[SyncVerdict]) -> Table:
    """A server a row; what differs is counted."""
    table = Table()
    table.add_column("server", overflow="fold")
    for heading in ("tensors", "megabytes", "differing"):
        table.add_column(heading, justify="right")
    for each in verdicts:
        cells = (str(each.tensors), f"{each.bytes / MEGABYTE:.1f}", str(len(each.differing)))
        table.add_row(Text(each.server), *cells)
    return table
