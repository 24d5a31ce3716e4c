"""Ranks that exchange messages: `python message_ranks.py JOB.json`; see test_rank_messages.

JOB.json is {"folder", "planted": {name: bytes in hexadecimal digits}}. Each rank writes what it found to FOLDER/rank-RANK.json. What rank 1
plants, if it were executed as a pickle, writes FOLDER/executed-RANK.
"""

import json
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from rollmill.tasks.errors import StoreError, SyncError
from rollmill.tasks.observe.metrics import MetricTable, Reduced
from rollmill.tasks.observe.spans import Span
from rollmill.tasks.sync.weight_messages import SendResult
from rollmill.tasks.train.policy_logprobs import gather_rows
from rollmill.tasks.train.rank_messages import all_gather_messages, gather_messages
from rollmill.tasks.train.service.ranks import gather_results, join_ranks

JOB = json.loads(Path(sys.argv[1]).read_text())
FOLDER = Path(JOB["folder"])


class Record(NamedTuple):
    text: str
    table: MetricTable
    spans: list[Span]
    visits: npt.NDArray[np.int64]
    rows: dict[int, npt.NDArray[np.float32]]


def make_record(rank: int) -> Record:
    """Long on rank 1; empty, infinite and unknown values on both."""
    table = MetricTable()
    table.add("train/loss", Reduced("distribution", 0.1 + rank, 3.0), "addition")
    table.add("train/gradient_norm", Reduced("max", np.float64(math.inf)))
    span = Span("trainer/0", "main", "forward", -1, 1_700_000_000_000_000_000 + rank, 3, "rank 1")
    rows = {2 * row + rank: np.array([math.nan, -0.0, row], np.float32) for row in range(1 + 1000 * rank)}
    rows |= {-1: np.zeros((4, 0), np.float32), -2: np.arange(8, dtype=np.float32).reshape(2, 4)[:, 1:3]}
    return Record(
        "ä" * rank, table, [span] * rank, np.array([[1, 2**60]] * rank, np.int64).reshape(-1, 2), rows
    )


def is_same(found: Record, expected: Record) -> bool:
    arrays = [
        (found.visits, expected.visits),
        *((found.rows[row], each) for row, each in expected.rows.items()),
    ]
    return (
        (found.text, found.table, found.spans) == (expected.text, expected.table, expected.spans)
        and found.rows.keys() == expected.rows.keys()
        and all(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
            for one, other in arrays
        )
    )


def exchange_records(rank: int) -> dict[str, Any]:
    def fail() -> str:
        if rank == 1:
            raise StoreError("no room \udc80")
        return "written"

    own, sent = make_record(rank), [SendResult(f"server {rank}", 7, 0.5)]
    at_first, everywhere = gather_messages(own, Record), all_gather_messages(own, Record)
    try:
        failed = str(gather_results(fail, str))
    except SyncError as error:
        failed = str(error)
    return {
        "gathered": [is_same(each, make_record(number)) for number, each in enumerate(at_first)],
        "all_gathered": [is_same(each, make_record(number)) for number, each in enumerate(everywhere)],
        "writable": all(each.flags.writeable for every in everywhere for each in every.rows.values()),
        "results": gather_results(lambda: sent, list[SendResult])
        == ([[SendResult(f"server {each}", 7, 0.5)] for each in range(2)] if rank == 0 else []),
        "failed": failed,
    }


def mark() -> None:
    (FOLDER / f"executed-{os.environ['RANK']}").touch()


class Planted:
    """Executes `mark` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return mark, ()


def plant(message: bytes, announced: int) -> None:
    """Take part in an exchange with any bytes, as another program may."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([announced]))
    if announced != len(message):
        return
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)


def meet_planted(rank: int) -> dict[str, str]:
    """What rank 0 does with each message that rank 1 plants where log-probabilities of rows are expected."""
    messages = {name: bytes.fromhex(each) for name, each in JOB["planted"].items()}
    messages |= {"pickle": pickle.dumps(Planted()), "size": b"\x80"}
    found = {}
    for name, message in messages.items():
        if rank == 1:
            plant(message, 2**62 if name == "size" else len(message))
            continue
        try:
            found[name] = f"taken: {gather_rows({})}"
        except RuntimeError as error:
            found[name] = str(error)
    return found


def main() -> None:
    rank = join_ranks(60.0).rank
    found = {"records": exchange_records(rank), "planted": meet_planted(rank)}
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
