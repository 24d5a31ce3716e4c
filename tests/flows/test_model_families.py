"""Two steps of the whole loop with tiny models of published families, in both precisions, by ZeRO-1 and -3, and with adapters."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest
import yaml
from model_families import FAMILIES, save_tiny_family

from tests.stubs.toy_settings import toy_values

pytestmark = [pytest.mark.service, pytest.mark.long]

STEPS, GROUPS, GROUP_SIZE = 2, 4, 4

SCORER = "def length(candidate):\n    return (len(candidate.answer) % 7) / 7\n"
"""Rewards that are spread whatever a model with random weights answers."""


LIMITS = {"float32": 2e-5, "bfloat16": 0.05}
"""Of the mean difference between the log-probabilities of server and trainer, in nats."""


class Cell(NamedTuple):
    """One way to train a family."""

    dtype: str
    zero_stage: int
    rank: int  # of adapters; 0: all weights are trained

    def __str__(self) -> str:
        return f"{self.dtype}-zero{self.zero_stage}" + ("-lora" if self.rank else "")


# Each pair of two values occurs once.
CELLS = (
    Cell("float32", 1, 0),
    Cell("bfloat16", 3, 0),
    Cell("bfloat16", 1, 4),
    Cell("float32", 3, 4),
)


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sampled_trained_synced_and_verified(workplace: Any, family: str, cell: Cell) -> None:
    save_tiny_family(workplace.folder / "model", family)
    (workplace.folder / "rewards.py").write_text(SCORER)
    problems = [{"prompt": f"What is {n} and {n + 1}?", "answer": str(n)} for n in range(64)]
    (workplace.folder / "problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    write_preset(workplace, cell)

    done = workplace.run("run", "family")

    assert done.returncode == 0, done.stdout
    assert "differ" not in done.stdout, done.stdout
    verified = workplace.run("verify", "family")
    assert verified.returncode == 0, verified.stdout
    metrics = read_metrics(workplace.folder / "runs" / "family")
    for step in range(STEPS):
        assert metrics[step, "train/updated"] == 1.0
        assert metrics[step, "train/gradient_norm"] > 0
        assert metrics[step, "sync/parity_alarms"] == 0
        # False for NaN too: servers were compared.
        assert metrics[step, "sync/logprob_difference_mean"] < LIMITS[cell.dtype]


def write_preset(workplace: Any, cell: Cell) -> None:
    values = toy_values(
        {
            "steps": STEPS,
            "model": "model",
            "rollout": {
                "environment": "prompts",
                "prompts": {"path": "problems.jsonl"},
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
            },
            "score": {"scorer": "rewards:length"},
            "train": {
                "dtype": cell.dtype,
                "zero_stage": cell.zero_stage,
                "ranks": 2,
                "warmup_steps": 0,
                "lora": {"rank": cell.rank},
            },
            "serve": {"dtype": cell.dtype, "python": str(workplace.vllm_python)},
            "evaluate": {"every": 0, "n_prompts": 4},
        }
    )
    (workplace.folder / "conf" / "family.yaml").write_text(yaml.safe_dump(values))


def read_metrics(run: Path) -> dict[tuple[int, str], float]:
    """Values of the metrics of all environments, by step and name."""
    rows = pl.scan_ipc(run / "metrics/**/*.arrow", hive_partitioning=True).unique()
    found = rows.filter(pl.col("env") == "all").select("step", "name", "value").collect()
    return {(step, name): value for step, name, value in found.iter_rows()}
