"""Run by the trainer's launcher: each rank asserts that it gets the rows of a stored batch that it asks for.

JOB.json: {"folder"}, of a run with a batch of step 0.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from rollmill.tasks.errors import BatchRefusedError, RollmillError, ShardError
from rollmill.tasks.train.batch_reading import exchange_outlines, read_on_all_ranks, send_rows
from rollmill.tasks.train.samples import read_portion, read_samples
from rollmill.tasks.train.service.ranks import join_ranks


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    ranks = join_ranks(120.0)
    whole = read_samples(job["folder"], 0)[1]
    n_rows = len(whole.trajectory_ids)
    _, read, held = read_portion(job["folder"], 0, (ranks.rank, ranks.world_size))
    stored = {
        "trainer": {
            whole.trajectory_ids[row]: np.full(len(whole.token_ids[row]), row, np.float32)
            for row in held
            if row % 4
        }
    }
    outlined, missing = exchange_outlines(read, held, stored)
    assert [outlined.outline(row) for row in range(n_rows)] == [whole.outline(row) for row in range(n_rows)]
    assert outlined.temperatures.tolist() == whole.temperatures.tolist()
    assert outlined.split(3) == whole.split(3)
    assert missing == {"trainer": [row for row in range(0, n_rows, 4) if whole.outline(row).n_trained]}

    # Some rows go to two ranks, and some to none.
    needed = [
        {row for row in range(n_rows) if row % 5 in (rank, rank + 1)} for rank in range(ranks.world_size)
    ]
    own, logprobs = send_rows(outlined, held, stored, needed)
    for row in range(n_rows):
        is_own, name = row in needed[ranks.rank], whole.trajectory_ids[row]
        for column in ("token_ids", "loss_masks", "logprobs"):
            sent, expected = getattr(own, column)[row], getattr(whole, column)[row]
            np.testing.assert_array_equal(sent, expected if is_own else [])
            assert sent.dtype == expected.dtype
        if is_own and row % 4:
            np.testing.assert_array_equal(
                logprobs["trainer"].pop(name), np.full(len(own.token_ids[row]), row)
            )
    assert not logprobs["trainer"]
    check_refusals(ranks.rank)
    dist.barrier()  # a rank that leaves while the other is at work may abort at its end
    dist.destroy_process_group()


def check_refusals(rank: int) -> None:
    """What one rank alone cannot read fails on all, and no rank waits for it."""
    for failing in (0, 1):
        for error in (BatchRefusedError("no spread"), ShardError("damaged")):

            def read(failing: int = failing, error: RollmillError = error) -> int:
                if rank == failing:
                    raise error
                return rank

            text = str(error) if rank == failing else f"rank {failing} refuses the batch: {error}"
            with pytest.raises(type(error)) as raised:
                read_on_all_ranks(read)
            assert str(raised.value) == text
    assert read_on_all_ranks(lambda: rank) == rank


main()
