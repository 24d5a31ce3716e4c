"""A server of OpenEnv plays the episodes of a run with the real vLLM and trainer."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan

pytestmark = [pytest.mark.service, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def test_a_server_of_openenv_plays_and_its_rewards_by_turn_are_trained_on(
    workplace: Any, tied_model: Path
) -> None:
    python = ROOT / ".venv-openenv" / "bin" / "python"
    assert python.exists(), "`make test` makes .venv-openenv"
    uvicorn = (
        f"{python} -m uvicorn --app-dir {ROOT / 'tests' / 'servers'} --port {{port}} openenv_tasks:digits"
    )
    settings = {
        "steps": 2,
        "model": tied_model,
        "start_model.steps": 0,
        "rollout.environment": json.dumps(
            {"name": "openenv", "args": {"command": uvicorn, "action": "message"}}
        ),
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_in_flight": 8,
        "score.scorer": "environment",
        "evaluate.every": 0,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    ran = workplace.run("run", "small", *words)
    assert ran.returncode == 0, ran.stdout
    run = RunFolder(str(workplace.folder / "runs" / "small"))
    rows = scan(run, "rollouts").collect()
    assert len(rows) == 16
    assert set(rows["env"]) == {"openenv"}
    played = rows.filter(pl.col("status") == "complete")
    scores = {each["trajectory_id"]: each for each in scan(run, "scores").collect().iter_rows(named=True)}
    for row in played.iter_rows(named=True):
        said = [each["content"] for each in json.loads(row["messages"]) if each["role"] == "assistant"]
        rewards = [len({each for each in text if each.isdigit()}) / 10 for text in said]
        assert len(said) == 2
        assert scores[row["trajectory_id"]]["turn_rewards"] == pytest.approx(rewards)
        assert scores[row["trajectory_id"]]["reward"] == pytest.approx(sum(rewards))
    assert len(scan(run, "batches").collect()) > 0
