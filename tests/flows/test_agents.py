"""A program of others plays the episodes of a run with the real vLLM and trainer."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rollmill.flows.presets import PRESETS

pytestmark = pytest.mark.service

AGENT = Path(PRESETS).absolute() / "agents" / "ask_twice.py"


def test_a_program_with_a_client_of_openai_plays_and_what_was_sampled_is_trained_on(workplace: Any) -> None:
    settings = {
        "steps": 2,
        "rollout.environment": "agent",
        "rollout.agent.problems": "addition",
        "rollout.agent.command": f"{sys.executable} {AGENT}",
        "rollout.groups_per_step": 4,
        "rollout.group_size": 4,
        "rollout.max_in_flight": 4,
        "evaluate.every": 0,
        "start_model.steps": 150,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ran = workplace.run("run", "small", *words)
    assert ran.returncode == 0, ran.stdout
    run = workplace.folder / "runs" / "small"
    rows = pl.scan_ipc(run / "rollouts/**/*.arrow", hive_partitioning=True).collect()
    assert len(rows) == 32
    played = rows.filter(pl.col("status") == "complete")
    assert len(played) > 0
    for row in played.iter_rows(named=True):
        asked, said, again, last = json.loads(row["messages"])
        assert again["content"] == f"\nagain: {asked['content']}"
        assert json.loads(row["outcome"])["output"].startswith(last["content"])
        assert said["role"] == "assistant"
        # Tokens are characters: none was sampled that the mask lacks, and none else is masked.
        mask = np.array(row["loss_mask"])
        assert row["n_completion_tokens"] == mask.sum()
        starts = np.flatnonzero(np.diff(mask.astype(int)) == 1)
        assert len(starts) == 2
        assert starts[0] + 1 == len(asked["content"])
    metrics = pl.scan_ipc(run / "metrics/**/*.arrow", hive_partitioning=True).collect()
    differences = metrics.filter(pl.col("name") == "sync/logprob_difference")["value"]
    assert len(differences) >= 2
    assert differences.max() < 1e-4
