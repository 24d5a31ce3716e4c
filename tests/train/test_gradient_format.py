"""The format of the gradient that an update applies in bfloat16."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.service
@pytest.mark.slow
def test_one_rank_does_not_round_the_sum_of_its_micro_batches_to_bfloat16(
    tiny_model: Path, batches: Any, run_ranks: Callable[[str, int, dict[str, object]], None], tmp_path: Path
) -> None:
    batches.write_step(tmp_path, 0, batches.uneven_rows(8))
    case = {"model": str(tiny_model), "order": list(range(8)), "annotated": False, "rank_by_rank": False}
    config = {"dtype": "bfloat16", "zero_stage": 1, "layout": "padded", "micro_batch_tokens": 300}
    cases = [case | {"head_chunk_bytes": 1 << 20, "config": config}]
    job = {"folder": str(tmp_path), "output": str(tmp_path), "shift_nats": 0.0, "eps": 1.0, "cases": cases}
    run_ranks("gradient_ranks.py", 1, job)
    gradients = load_file(tmp_path / "0.safetensors")
    assert json.loads((tmp_path / "facts.json").read_text())
    sums = torch.cat([each.flatten() for each in gradients.values()])
    sums = sums[sums != 0]
    assert len(sums)
    assert (sums != sums.bfloat16().float()).float().mean() > 0.5
