"""Which rows go through the model together, on which rank: a plan, before anything is moved."""

import heapq
from collections.abc import Sequence

MicroBatch = list[int]


def pack(lengths: Sequence[int], n_ranks: int, budget_tokens: int) -> list[list[MicroBatch]]:
    """Deal rows to ranks by tokens, and cut each rank's rows into micro-batches of like length.

    Args:
        lengths: [B] tokens of each row.
        n_ranks: W.
        budget_tokens: most tokens of a micro-batch, rows padded to its longest; a row that is longer than that
            has a micro-batch to itself.

    Returns:
        [W] micro-batches of each rank, each a list of row numbers; every rank has the same number of them, the
        missing ones are empty. Without rows every rank has none.

    Example: pack([9, 2, 8, 3], 2, 10) is [[[0], [1]], [[2], [3]]], and pack([9, 2, 8], 2, 10) is
        [[[0], []], [[2], [1]]].
    """
    shares = [_cut(rows, lengths, budget_tokens) for rows in _deal(lengths, n_ranks)]
    longest = max(len(share) for share in shares)
    return [share + [[]] * (longest - len(share)) for share in shares]


def _deal(lengths: Sequence[int], n_ranks: int) -> list[list[int]]:
    """[W] rows of each rank, longest first: the next longest goes to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    loads = [(0, rank) for rank in range(n_ranks)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(row)
        heapq.heappush(loads, (tokens + lengths[row], rank))
    return shares


def _cut(rows: list[int], lengths: Sequence[int], budget_tokens: int) -> list[MicroBatch]:
    cuts: list[MicroBatch] = []
    for row in rows:
        if cuts and (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] <= budget_tokens:
            cuts[-1].append(row)
        else:
            cuts.append([row])
    return cuts
