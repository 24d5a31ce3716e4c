"""The tables of an A/B comparison: means and differences with intervals, and where two scorers disagree most."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from stored_policies import Rewards, begin_run, store_evaluation, store_rows

from rollmill.tasks.look.comparisons.ab_tables import (
    ScoredPolicy,
    count_tokens,
    make_differences_view,
    make_disagreements_view,
    make_policies_view,
)
from rollmill.tasks.look.comparisons.gate_table import make_gate_view
from rollmill.tasks.look.comparisons.paired_evaluations import compute_paired_interval
from rollmill.tasks.look.tables.view import View
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.promotion.gate_record import GateCheck, GatedPolicy, GateRecord

N, K, VERSION = 40, 2, 3


def draw(seed: int, level: float) -> Rewards:
    rng = np.random.default_rng(seed)
    return Rewards(
        (rng.uniform(size=N) < level).astype(float), (rng.uniform(size=(N, K)) < level).astype(float)
    )


def make_policy(root: Path, name: str, own: Rewards, other: Rewards | None) -> RunFolder:
    """A run whose evaluation has the rewards `own`, and by the scorer b@1 those of `other`."""
    folder = RunFolder(root / name)
    begin_run(folder, root / "model", N, K)
    store_evaluation(folder, own, version=VERSION)
    if other is not None:
        answers = [(prompt, sample) for prompt in range(N) for sample in range(K + 1)]
        by_answer = np.concatenate([other.greedy[:, None], other.sampled], axis=1).reshape(-1)
        columns: dict[str, Any] = {
            "trajectory_id": [f"{name}.v{VERSION}.{prompt}.{sample}" for prompt, sample in answers],
            "status": ["scored"] * len(answers),
            "reward": by_answer.tolist(),
        }
        store_rows(folder, "evaluation_scores", columns, scorer="b@1", step=VERSION)
    return folder


@pytest.fixture
def policies(tmp_path: Path) -> list[ScoredPolicy]:
    return [
        ScoredPolicy(
            name, make_policy(tmp_path, name, draw(seed, level), draw(seed + 10, 1 - level)), VERSION, "a@1"
        )
        for seed, (name, level) in enumerate((("first", 0.3), ("second", 0.8)))
    ]


def test_each_policy_has_its_mean_under_each_scorer(policies: list[ScoredPolicy]) -> None:
    view = make_policies_view(policies, ["a@1", "b@1"], [])

    cells = {(each["policy"], each["answers"], each["scorer"]): each for each in view.values["policies"]}  # type: ignore[attr-defined]
    assert len(cells) == len(view.rows) * 2 == 8
    for seed, (name, level) in enumerate((("first", 0.3), ("second", 0.8))):
        for scorer, rewards in (("a@1", draw(seed, level)), ("b@1", draw(seed + 10, 1 - level))):
            cell = cells[name, "sampled", scorer]
            assert cell["reward"] == pytest.approx(rewards.sampled.mean())
            assert cell["reward_low"] < cell["reward"] < cell["reward_high"]
            assert cells[name, "greedy", scorer]["reward"] == pytest.approx(rewards.greedy.mean())


def test_differences_are_of_the_same_prompts(policies: list[ScoredPolicy]) -> None:
    view = make_differences_view(policies, ["a@1", "b@1"])

    (found,) = (
        each
        for each in view.values["differences"]  # type: ignore[attr-defined]
        if (each["answers"], each["scorer"]) == ("sampled", "a@1")
    )
    paired = draw(1, 0.8).sampled.mean(axis=1) - draw(0, 0.3).sampled.mean(axis=1)
    assert (found["policy"], found["against"], found["n"]) == ("second", "first", N)
    assert found["difference"] == pytest.approx(paired.mean())
    assert (found["low"], found["high"]) == pytest.approx(compute_paired_interval(paired, 1.0))


def print_narrow(view: View) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(view.page(80))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_on_80_columns_rows_keep_their_names_and_figures_are_shortened(policies: list[ScoredPolicy]) -> None:
    named = [replace(each, label=f"{each.label}-scorer@1") for each in policies]
    lines = print_narrow(make_differences_view(named, ["a@1", "b@1"])).splitlines()
    assert lines[1].split() == ["answers", "policy", "against", "a@1", "b@1"]
    assert [line.split()[:3] for line in lines[3:5]] == [
        [answers, "second-scorer@1", "first-scorer@1"] for answers in ("sampled", "greedy")
    ]
    assert lines[-1] == "not shown here: prompts"
    assert "not shown here" not in print_narrow(make_policies_view(named, ["a@1", "b@1"], []))


def test_a_gate_on_80_columns_has_the_probability_that_an_equal_policy_passes() -> None:
    values: dict[str, Any] = {
        "candidate": 0.7,
        "production": 0.5,
        "difference": 0.2,
        "low": 0.1,
        "pass_rate": 0.97,
    }
    gated = GatedPolicy(
        location="a", digest="0", run="r", version=3, evaluated_in="runs/r", evaluated_version=3, rows="0"
    )
    record = GateRecord(
        created_at="",
        candidate=gated,
        against=gated,
        margin=0.05,
        error_rate=0.05,
        min_reward=None,
        checks=tuple(GateCheck(env=env, answers="sampled", n=32, **values) for env in ("all", "addition")),
        reasons=(),
    )
    heading = print_narrow(make_gate_view(record)).splitlines()[1]
    assert heading.startswith("env       answers")
    assert "equal passes" in heading


def test_an_answer_without_a_score_counts_as_0(tmp_path: Path) -> None:
    policy = ScoredPolicy("one", make_policy(tmp_path, "one", draw(0, 0.5), None), VERSION, "a@1")

    values = make_policies_view([policy], ["a@1", "b@1"], []).values["policies"]
    assert {each["reward"] for each in values if each["scorer"] == "b@1"} == {0.0}  # type: ignore[attr-defined]


def test_the_interval_of_paired_differences_covers_the_truth_as_often_as_it_states() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        solved = rng.uniform(0.2, 0.8, 100)
        low, high = compute_paired_interval(  # type: ignore[misc]
            (rng.uniform(size=100) < solved + 0.1).astype(float) - (rng.uniform(size=100) < solved), 1.0
        )
        covered += low <= 0.1 <= high
    assert 0.935 <= covered / 2000 <= 0.975
    assert compute_paired_interval(np.zeros(29), 1.0) is None


def store_scores(folder: RunFolder, scorer: str, rewards: list[list[float]]) -> None:
    """Scores of step 0: a row for each sample of each group; NaN fails."""
    flat = [each for group in rewards for each in group]
    columns: dict[str, Any] = {
        "group": [group for group, of_group in enumerate(rewards) for _ in of_group],
        "trajectory_id": [
            f"r.{group}.{sample}.0" for group, of in enumerate(rewards) for sample in range(len(of))
        ],
        "status": ["failed" if math.isnan(each) else "scored" for each in flat],
        "reward": flat,
    }
    store_rows(folder, "scores", columns, scorer=scorer, step=0)


def test_the_interval_of_two_policies_that_are_always_right_is_not_empty(tmp_path: Path) -> None:
    right = Rewards(np.ones(N), np.ones((N, K)))
    both = [
        ScoredPolicy(name, make_policy(tmp_path, name, right, None), VERSION, "a@1")
        for name in ("first", "second")
    ]
    for each in make_differences_view(both, ["a@1"]).values["differences"]:
        assert each["low"] < -0.03
        assert each["high"] > 0.03


@pytest.mark.parametrize("n", [6, 8])
def test_equal_rewards_whose_mean_is_rounded_have_no_advantage(n: int, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    begin_run(folder, tmp_path / "model", 1, 1)
    rows = {
        "group": [0] * n,
        "sample": [*range(n)],
        "trajectory_id": [f"r.0.{k}.0" for k in range(n)],
        "status": ["complete"] * n,
    }
    store_rows(folder, "rollouts", rows | {"messages": ["[]"] * n, "example": ["{}"] * n}, step=0)
    for scorer, rewards in (("a@1", [0.1] * n), ("b@1", [1.0] + [0.0] * (n - 1))):
        store_rows(
            folder, "scores", rows | {"status": ["scored"] * n, "reward": rewards}, scorer=scorer, step=0
        )
    (row,) = make_disagreements_view(folder, ("a@1", "b@1"), "", 0).rows
    assert (row["trajectory"], row["advantage_a"]) == ("0.0", 0.0)
    assert row["difference"] == pytest.approx(math.sqrt(n - 1))


def test_one_trajectory_of_each_group_is_shown_the_largest_difference_of_advantages_first(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    begin_run(folder, tmp_path / "model", 1, 1)
    store_scores(folder, "a@1", [[0, 0, 1], [0, 100, 0], [1, 1, 1], [5, 6, 7]])
    store_scores(folder, "b@1", [[0, 1, 1], [1, 0, 0], [2, 2, 2], [50, 60, 70]])
    ids = [f"r.{group}.{sample}.0" for group in range(4) for sample in range(3)]
    said = [
        json.dumps([{"role": "user", "content": "?"}, {"role": "assistant", "content": each}]) for each in ids
    ]
    rollouts: dict[str, Any] = {"trajectory_id": ids, "example_id": ids, "messages": said}
    store_rows(folder, "rollouts", rollouts | {"n_completion_tokens": [2] * 12}, step=0)

    view = make_disagreements_view(folder, ("a@1", "b@1"), "http://127.0.0.1:4300", 10)

    # Group 2 has no spread, and in group 3 the scorers agree up to their scale.
    assert [row["trajectory"] for row in view.rows] == ["1.0", "0.1"]
    assert "trajectory  problem  answer" in print_narrow(view)
    first = view.rows[0]
    assert (first["a"], first["b"], first["answer"]) == (0.0, 1.0, "r.1.0.0")
    assert first["difference"] == pytest.approx(math.sqrt(2) + math.sqrt(0.5))
    assert first["link"] == "http://127.0.0.1:4300/trajectory/1.0"
    assert "compare?a=a@1&b=b@1" in view.notes[0]
    assert len(make_disagreements_view(folder, ("a@1", "b@1"), "", 1).rows) == 1
    assert count_tokens([folder]) == (24, 0)
