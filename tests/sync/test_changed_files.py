"""Files of changes: exact, small, refused by whoever holds other weights, and whole where a rank lacks what it wrote last."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.changed_buckets import SentCopy
from rollmill.tasks.sync.links.weight_files import encode_weight_file, read_weight_files
from rollmill.tasks.sync.transfer_plan import TransferPlan
from rollmill.tasks.sync.weight_receiver import view_tensors
from tests.stubs.transfer_ends import TIMEOUT_S, Weights, assert_equal, plan_of, weights_of

SHAPES = [
    ((300, 40), torch.bfloat16),
    ((7,), torch.float32),
    ((500, 9), torch.bfloat16),
    ((0,), torch.float16),
]


class Ranks:
    """Two ranks that write, with what each wrote last."""

    def __init__(self, folder: Path, plan: TransferPlan) -> None:
        self.folder, self.plan = folder, plan
        self.copies = [SentCopy(), SentCopy()]

    def write(self, weights: Weights, snapshot: str, base: str) -> list[str]:
        files = []
        for rank, copy in enumerate(self.copies):
            names = list(weights)[rank::2]
            part = {name: weights[name] for name in names}
            tensors, metadata = encode_weight_file(part, copy, self.plan, snapshot, base)
            path = self.folder / f"{snapshot}-{rank}.safetensors"
            save_file(tensors, path, metadata)
            files.append(str(path))
        return files


def read(files: list[str], plan: TransferPlan, buffer: torch.Tensor, held: str) -> int:
    limits = {"timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
    return read_weight_files(files, plan, buffer, held=held, **limits)


def change(weights: Weights, seed: int) -> Weights:
    """Change one element in fifty a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(each.shape, generator=generator) < 0.02, each * 1.01, each).to(
            each.dtype
        )
        for name, each in weights.items()
    }


def test_a_reader_that_holds_the_snapshot_before_needs_the_changes_alone(tmp_path: Path) -> None:
    weights = weights_of(0, SHAPES)
    plan = plan_of(weights, 2)
    ranks, buffer = Ranks(tmp_path, plan), torch.empty(plan.total_bytes, dtype=torch.uint8)
    n_bytes = sum(each.nbytes for each in weights.values())
    assert read(ranks.write(weights, "0", ""), plan, buffer, "") == n_bytes
    for number in range(1, 4):
        weights = change(weights, number)
        files = ranks.write(weights, str(number), str(number - 1))
        assert read(files, plan, buffer, str(number - 1)) < n_bytes / 4
        assert_equal(dict(view_tensors(plan, buffer)), weights)


def test_a_rank_that_lacks_the_snapshot_writes_its_part_whole(tmp_path: Path) -> None:
    weights = weights_of(0, SHAPES)
    plan = plan_of(weights, 2)
    ranks, buffer = Ranks(tmp_path, plan), torch.empty(plan.total_bytes, dtype=torch.uint8)
    read(ranks.write(weights, "0", ""), plan, buffer, "")
    # It has started again.
    ranks.copies[0] = SentCopy()
    weights = change(weights, 1)
    assert plan.total_bytes / 4 < read(ranks.write(weights, "1", "0"), plan, buffer, "0") < plan.total_bytes
    assert_equal(dict(view_tensors(plan, buffer)), weights)


@pytest.mark.parametrize("held", ["", "0"])
def test_changes_of_another_snapshot_are_refused(tmp_path: Path, held: str) -> None:
    weights = weights_of(0, SHAPES)
    plan = plan_of(weights, 2)
    ranks, buffer = Ranks(tmp_path, plan), torch.empty(plan.total_bytes, dtype=torch.uint8)
    read(ranks.write(weights, "0", ""), plan, buffer, "")
    ranks.write(change(weights, 1), "1", "0")
    files = ranks.write(change(weights, 2), "2", "1")
    with pytest.raises(SyncError, match=f"changes of the snapshot 1, this server holds {held or 'none'}$"):
        read(files, plan, buffer, held)
    # Whoever says that it holds them, and does not, is found out by the checksums.
    with pytest.raises(
        SyncError, match=r"2-0\.safetensors: layers\.0\.weight: .* they were other bytes before"
    ):
        read(files, plan, buffer, "1")
