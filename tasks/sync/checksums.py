"""Whether tensors arrived as they were sent: a few others at each sync, since a few tokens cannot see one small tensor."""

from collections.abc import Mapping, Sequence

from tasks.errors import ChecksumError


def names_in_turn(names: Sequence[str], version: int, n: int) -> tuple[str, ...]:
    """The tensors whose checksums are compared at a version; all come by within ceil(len(names) / n) versions in a row.

    Example: of 5 tensors 2 at a time, version 0 has the first two, version 1 the next, version 2 the last and the first.

    Args:
        names: of all tensors, in an order that is the same each time.
        version: the policy version's number.
        n: how many; 0: none.
    """
    first = version * n
    return tuple(names[(first + i) % len(names)] for i in range(min(n, len(names))))


def differing_names(sent: Mapping[str, str], arrived: Mapping[str, str]) -> tuple[str, ...]:
    """The tensors whose checksums are not the same; one that has none on arrival differs."""
    return tuple(name for name, digest in sent.items() if arrived.get(name) != digest)


def compare_checksums(server: str, version: str, sent: Mapping[str, str], arrived: Mapping[str, str]) -> None:
    """Compare what arrived at a server with what the trainer has.

    Args:
        server: its address.
        version: name of the weights.
        sent: SHA-256 by tensor, of the trainer's.
        arrived: the server's; a tensor that is missing there differs.

    Raises:
        ChecksumError: names every tensor that differs.
    """
    if differing := differing_names(sent, arrived):
        raise ChecksumError(server, version, differing)
