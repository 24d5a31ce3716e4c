"""Ranges of numbered things, and equal cuts of things that are stored one after another."""

from collections.abc import Sequence
from itertools import pairwise

Range = tuple[int, int]
"""(first, end) without the end."""


def overlap(one: Range, other: Range) -> Range:
    """Return the common part of two ranges; an empty range (n, n) if there is none.

    Example: (0, 5) and (3, 9) have (3, 5) in common, (0, 2) and (3, 9) nothing.
    """
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def cut_evenly(sizes: Sequence[int], n_parts: int) -> list[list[tuple[int, Range]]]:
    """Cut items, stored one after another, into `n_parts` parts of equal size; an item may be split.

    Returns:
        [n_parts] lists of (item, range in the item).

    Example: items of sizes 6 and 4 in two parts are [[(0, (0, 5))], [(0, (5, 6)), (1, (0, 4))]].
    """
    total = sum(sizes)
    bounds = [part * total // n_parts for part in range(n_parts + 1)]
    parts: list[list[tuple[int, Range]]] = []
    for part in pairwise(bounds):
        start, ranges = 0, []
        for item, size in enumerate(sizes):
            first, end = overlap(part, (start, start + size))
            if first < end:
                ranges.append((item, (first - start, end - start)))
            start += size
        parts.append(ranges)
    return parts


def assign_evenly(sizes: Sequence[int], n_parts: int) -> list[int]:
    """Assign whole items to parts of about equal size; returns the number of the part for each item, [n_items].

    An item gets the part in which its middle would be if all items together were cut evenly.

    Example: items of sizes 6, 2 and 4 in two parts go to [0, 1, 1].
    """
    total, start, parts = max(sum(sizes), 1), 0, []
    for size in sizes:
        parts.append(min((start + size // 2) * n_parts // total, n_parts - 1))
        start += size
    return parts
