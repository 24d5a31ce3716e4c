"""How conversations change from cycle to cycle: intervals count prompts, however many groups their answers form."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_policies import begin_run, store_rows

from rollmill.tasks.look.comparisons.log_drift import make_drift_view
from rollmill.tasks.store.folders import RunFolder


def store_cycles(folder: RunFolder, rewards: np.ndarray, tokens: int = 3) -> None:
    """Store a cycle of one step for each row of [cycles, prompts, answers] rewards; every answer is a group."""
    begin_run(folder, folder.local.parent / "model", 1, 1)
    for step, of_step in enumerate(rewards):
        places = [(prompt, k) for prompt in range(of_step.shape[0]) for k in range(of_step.shape[1])]
        n = len(places)
        rows: dict[str, Any] = {
            "group": [step * n + number for number in range(n)],
            "sample": [0] * n,
            "trajectory_id": [f"{folder.name}.{step * n + number}.0.0" for number in range(n)],
        }
        more = {
            "step": [step] * n,
            "example_id": [f"p{prompt}" for prompt, _ in places],
            "status": ["complete"] * n,
            "n_completion_tokens": [tokens] * n,
        }
        store_rows(folder, "rollouts", rows | more, step=step)
        scores = {"step": [step] * n, "status": ["scored"] * n, "reward": of_step.reshape(-1).tolist()}
        store_rows(folder, "scores", rows | scores, scorer="a@1", step=step)


def test_many_answers_to_a_few_prompts_are_no_evidence_of_a_change(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n_marked = 0
    for trial in range(20):
        # The prompts of a cycle are easy or hard; all answers to one are alike.
        rewards = np.repeat((rng.uniform(size=(2, 40, 1)) < 0.5).astype(float), 12, axis=2)
        folder = RunFolder(tmp_path / f"run-{trial}")
        store_cycles(folder, rewards)
        view = make_drift_view(folder, [1, 2])
        n_marked += any("reward differs" in note for note in view.notes)
        first, second = view.rows
        assert (first["n"], second["n"], second["new_prompts"]) == (480, 480, 0.0)
        assert second["reward"] == pytest.approx(rewards[1].mean())
        assert second["tokens"] == 3.0
    # One in twenty by chance; of the answers, not of the prompts, it would be most.
    assert n_marked <= 5


def test_a_few_prompts_have_no_interval(tmp_path: Path) -> None:
    store_cycles(RunFolder(tmp_path / "run"), np.array([np.zeros((5, 4)), np.ones((5, 4))]))
    view = make_drift_view(RunFolder(tmp_path / "run"), [1, 2])
    assert (view.rows[1]["reward_change"], view.notes) == (1.0, [])
    assert math.isnan(float(str(view.rows[1]["reward_error"])))
