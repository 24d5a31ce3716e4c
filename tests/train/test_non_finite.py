"""A gradient or a loss that is not finite, on one rank or on all, changes nothing."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from rollmill.tasks.train.batch_training import NON_FINITE_LOSS


@pytest.mark.service
@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_non_finite_gradient_or_loss_leaves_weights_and_moments_untouched_on_every_stage(
    n_ranks: int, tiny_model: Path, run_ranks: Callable[[str, int, dict[str, object]], None], tmp_path: Path
) -> None:
    cases = [
        {"name": f"zero{stage}-{dtype}", "zero_stage": stage, "dtype": dtype}
        for stage, dtype in product((0, 1, 2, 3), ("float32", "bfloat16"))
    ]
    output = tmp_path / "facts.json"
    job = {"model": str(tiny_model), "output": str(output), "skipped": "skipped", "cases": cases}
    run_ranks("non_finite_ranks.py", n_ranks, job)
    found = json.loads(output.read_text())

    assert found.pop("skipped") == {"reason": NON_FINITE_LOSS, "n_updates": 0, "is_untouched": True}
    for name, facts in found.items():
        assert facts.pop("n_tensors") >= 4 * 27, name
        assert facts == {
            "applied_non_finite": False,
            "is_untouched": True,
            "applied_afterwards": True,
            "changed_afterwards": True,
            "as_if_nothing_had_been": True,
        }, name
