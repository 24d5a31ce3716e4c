"""Group commit, whatever the order in which rows, pauses and flushes come."""

import asyncio
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.shard import JOINED_BYTES, join_batches
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]
Action = tuple[str, int, int]

APPENDS = st.tuples(st.sampled_from(["rollouts", "groups"]), st.integers(0, 2), st.integers(0, 4))
PAUSES = st.tuples(
    st.sampled_from(["yield", "sleep", "flush", "await", "cancel", "expect"]), st.just(0), st.just(0)
)


@given(st.lists(st.one_of(APPENDS, PAUSES), max_size=30), st.sampled_from([0.0, 0.001, 60.0]))
@settings(max_examples=60, deadline=None)
def test_every_row_is_stored_once_in_its_partition_and_in_order(
    rows: RowMaker, actions: list[Action], flush_s: float
) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        folder.tmp.mkdir()
        expected = asyncio.run(carry_out(folder, rows, actions, flush_s))
        for (dataset, step), groups in expected.items():
            assert read(folder, dataset, ["group"], step=step)["group"].to_pylist() == groups
        assert read(folder, "rollouts").num_rows == sum(len(expected["rollouts", step]) for step in range(3))
        assert list(folder.tmp.iterdir()) == []


async def carry_out(
    folder: RunFolder, rows: RowMaker, actions: Sequence[Action], flush_s: float
) -> dict[tuple[str, int], list[int]]:
    """Append rows with running group numbers; what was acknowledged is checked on the spot."""
    numbers, expected = itertools.count(), defaultdict[tuple[str, int], list[int]](list)
    async with RunWriter(open_files(folder), 1, flush_s) as writer, AsyncExitStack() as expecting:
        last: asyncio.Future[None] | None = None
        for kind, step, n in actions:
            if kind in ("rollouts", "groups"):
                groups = [next(numbers) for _ in range(n)]
                last = writer.append(kind, rows(kind, n, step=step, group=groups), step=step)
                expected[kind, step] += groups
            elif kind == "flush" or (
                kind == "await" and last is not None and not last.cancelled() and flush_s < 1
            ):
                await (writer.flush() if kind == "flush" or last is None else last)
                if kind == "flush":
                    assert read(folder, "groups").num_rows == sum(
                        len(expected["groups", s]) for s in range(3)
                    )
            elif kind == "cancel" and last is not None:
                last.cancel()
            elif kind == "expect":
                # From here to the next such action.
                await expecting.aclose()
                expecting.enter_context(writer.expect_rows())
            else:
                await asyncio.sleep(0.002 if kind == "sleep" else 0)
    return expected


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12))
def test_joining_pieces_keeps_every_row_and_the_order_and_copies_no_large_piece(
    pieces: list[tuple[int, bool]],
) -> None:
    large = pa.array([b"x" * (1 << 23)], pa.large_binary())
    batches = [
        pa.record_batch(
            {
                "n": pa.array([i] * (1 if is_large else n), pa.int64()),
                "bytes": large if is_large else pa.array([b""] * n, pa.large_binary()),
            }
        )
        for i, (n, is_large) in enumerate(pieces)
    ]
    joined = list(join_batches(batches, JOINED_BYTES))
    rows_in_order = [n for batch in batches for n in batch.column("n").to_pylist()]
    assert [n for batch in joined for n in batch.column("n").to_pylist()] == rows_in_order
    assert [batch for batch in joined if batch.nbytes > 1 << 22] == [
        batch for batch in batches if batch.nbytes > 1 << 22
    ]
    is_large = [batch.nbytes > 1 << 22 for batch in joined]
    assert all(left or right for left, right in itertools.pairwise(is_large))
