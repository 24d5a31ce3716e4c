"""Episodes of several turns through the real vLLM, the environment in worker processes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rollmill.tasks.rollout.environments.calculator import calculate

pytestmark = pytest.mark.service


def test_two_turns_with_a_tool_are_played_in_workers_and_trained_on(workplace: Any) -> None:
    settings = {
        "steps": 2,
        "rollout.environment": "calculator",
        "rollout.env_workers": 2,
        "rollout.env_worker_max_episodes": 20,
        "score.scorer": "calculator_turns",
        "score.credit": "turn",
        "start_model.steps": 150,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ran = workplace.run("run", "small", *words)
    assert ran.returncode == 0, ran.stdout
    run = workplace.folder / "runs" / "small"
    check_rows(run)
    check_credit(run)
    metrics = pl.scan_ipc(run / "metrics/**/*.arrow", hive_partitioning=True).collect()
    differences = metrics.filter(pl.col("name") == "sync/logprob_difference")["value"]
    assert len(differences) >= 2
    assert differences.max() < 1e-4
    assert len(list((run / "logs").glob("environment-*.log"))) == 2


def check_rows(run: Path) -> None:
    """Each row's mask has the policy's words and no others, what the calculator printed is right, and not sampled."""
    rows = pl.scan_ipc(run / "rollouts/**/*.arrow", hive_partitioning=True).collect()
    assert rows["status"].unique().to_list() in (
        ["complete"],
        ["complete", "truncated"],
        ["truncated", "complete"],
    )
    with_call = rows.filter(pl.col("turns") == 2)
    assert len(with_call) > 0
    for row in with_call.iter_rows(named=True):
        asked, called, printed, _ = json.loads(row["messages"])
        assert [asked["role"], called["role"], printed["role"]] == ["user", "assistant", "tool"]
        assert printed["content"] == calculate(called["content"])
        mask = np.array(row["loss_mask"])
        starts = np.flatnonzero(np.diff(mask.astype(int)) == 1)
        ends = np.flatnonzero(np.diff(mask.astype(int)) == -1)
        assert (len(starts), len(ends)) == (2, 1)
        assert starts[1] - ends[0] == len(printed["content"])
        assert np.isnan(np.array(row["logprobs"], float)[~mask]).all()


def check_credit(run: Path) -> None:
    """The trained tokens of each turn have its return to go, minus the mean of the group's returns at that turn."""
    rows, scores, batch = (
        pl.scan_ipc(run / f"{name}/**/*.arrow", hive_partitioning=True).collect()
        for name in ("rollouts", "scores", "batches")
    )
    rewards = dict(scores.select("trajectory_id", "turn_rewards").iter_rows())
    lengths = dict(rows.select("trajectory_id", "turn_tokens").iter_rows())
    to_go = {name: np.cumsum(each[::-1])[::-1] for name, each in rewards.items()}
    assert len(batch) > 0
    for name, group, found in batch.select("trajectory_id", "group", "token_advantages").iter_rows():
        others = scores.filter(pl.col("group") == group)["trajectory_id"].to_list()
        means = [
            np.mean([to_go[each][turn] for each in others if len(to_go[each]) > turn])
            for turn in range(len(to_go[name]))
        ]
        expected = np.repeat(to_go[name] - means, lengths[name])
        np.testing.assert_allclose(found, expected, atol=1e-6)
