"""`rollmill inspect`: what it shows of a run, filtered, sorted, and at any width."""

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rollmill.tasks.look.tables.run_tables import make_run_view
from rollmill.tasks.look.tables.view import Column, View
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.step_settings import EarlierSettings
from rollmill.tasks.store.run.writable_run import OpenRun

Command = Callable[..., str]


def trajectories(rollmill: Command, *words: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(rollmill("inspect", "small", "--json", *words))["trajectories"]
    return rows


def test_a_run_is_shown_by_step_with_its_totals(rollmill: Command) -> None:
    shown = json.loads(rollmill("inspect", "small", "--json"))
    assert (shown["steps"], shown["trajectories"]) == (3, 48)
    assert shown["by_status"] == {"cancelled": 1, "complete": 46, "failed": 1}
    assert [row["lost"] for row in shown["by_step"]] == [0, 2, 1]
    assert [round(row["reward"], 3) for row in shown["by_step"]] == [0.438, 0.55, 0.644]
    # Wilson's interval of two right answers of two.
    accuracy = {"greedy_accuracy": 1.0, "greedy_accuracy_low": 0.342, "greedy_accuracy_high": 1.0}
    one = {"n": 2, "samples": 1}
    half = {"pass_at_k": 0.5, "pass_at_k_low": 0.095, "pass_at_k_high": 0.905}
    whole = {"pass_at_k": 1.0, "pass_at_k_low": 0.342, "pass_at_k_high": 1.0}
    assert [
        {name: value and round(value, 3) for name, value in row.items()} for row in shown["held_out"]
    ] == [
        {"step": 0, **one, "reward": 0.55, "reward_low": None, "reward_high": None, **accuracy, **half},
        {"step": 3, **one, "reward": 1.0, "reward_low": 0.342, "reward_high": 1.0, **accuracy, **whole},
    ]


def test_changes_of_settings_are_listed_with_their_first_step(tmp_path: Path) -> None:
    folder, given = RunFolder(tmp_path), {"fixed": {}, "versions": {}, "git_commit": ""}
    config = {"steps": 9, "train": {"lr": 0.2}}
    OpenRun.open(folder, config=config, config_of=StoreConfig(), **given).close()
    stored = read_manifest(folder)
    changed = replace(stored, earlier_settings=(EarlierSettings(4, {"train.lr": 0.1}),))
    write_manifest(open_files(folder), changed, stored)
    view = make_run_view(folder)
    assert view.notes[-1:] == ["from step 4 on: train.lr: 0.1 -> 0.2"]
    assert view.values["setting_changes"] == [{"step": 4, "changes": ["train.lr: 0.1 -> 0.2"]}]


def test_of_a_trajectory_that_was_sampled_again_the_last_attempt_is_shown_and_counted(
    rollmill: Command, redone_run: RunFolder
) -> None:
    def shown(command: str, *words: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(rollmill(command, redone_run.location, *words, "--json"))
        return values

    assert shown("inspect")["by_status"] == {"cancelled": 1, "complete": 47}
    assert shown("inspect")["trajectories"] == 48
    rows = shown("inspect", "--group", "5")["trajectories"]
    assert [row["trajectory"] for row in rows] == ["5.0", "5.1", "5.2", "5.3.1"]
    assert (rows[3]["status"], rows[3]["reward"]) == ("complete", 1.0)
    assert shown("show", "5.3.0")["status"] == "failed"


def test_two_scorers_do_not_double_the_trajectories_and_the_runs_scorer_is_shown(rollmill: Command) -> None:
    rows = trajectories(rollmill, "--group", "2")
    assert [(row["trajectory"], row["reward"]) for row in rows] == [
        ("2.0", 1.0),
        ("2.1", 0.1),
        ("2.2", 0.1),
        ("2.3", 0.1),
    ]
    brief = trajectories(rollmill, "--group", "2", "--scorer", "brevity@1")
    assert [row["reward"] for row in brief] == [-0.13, -0.03, -0.03, -0.03]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--status", "failed,cancelled"], ["5.3", "9.0"]),
        (["--status", "unscored", "--env", "addition"], ["6.1"]),
        (
            ["--step", "2", "--trajectories", "--reward", "0.5:", "--env", "addition"],
            ["10.0", "10.1", "10.2"],
        ),
        (["--step", "1:", "--reward", "1", "--sort", "-advantage", "--limit", "2"], ["6.0", "5.0"]),
        (["--step", "2", "--reward", "0.1", "--sort", "-tokens", "--limit", "1"], ["9.3"]),
        (["--group", "5", "--sort", "-reward"], ["5.0", "5.1", "5.2", "5.3"]),
        (["--evaluations", "--step", "0", "--reward", ":0.5"], ["v0.1.sampled"]),
    ],
)
def test_trajectories_are_filtered_and_sorted(rollmill: Command, words: list[str], found: list[str]) -> None:
    assert [row["trajectory"] for row in trajectories(rollmill, *words)] == found


def test_groups_are_filtered_by_why_they_are_not_trained_on(rollmill: Command) -> None:
    shown = json.loads(
        rollmill("inspect", "small", "--groups", "--status", "trained", "--step", "0:1", "--json")
    )
    assert [row["group"] for row in shown["groups"]] == [1, 2, 5, 6]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "7"], "the run has no such step; it has steps 0 to 2"),
        (["--step", "x"], "give one number, or LOW:HIGH"),
        (["--group", "12"], "the run has no such group; it has groups 0 to 11"),
        (["--status", "lost"], "the run has cancelled, complete, failed, truncated, unscored"),
        (["--groups", "--status", "lost"], "the run has no_reward_spread, trained"),
        (["--env", "chess"], "the run has addition, calculator"),
        (["--scorer", "judge@1"], "the run has scores of addition@1, brevity@1"),
        (["--sort", "rewards"], "rows can be sorted by step, groups"),
        (["--evaluations", "--step", "1"], "the run has no such version; it has versions 0, 3"),
        (["--steps", "--status", "failed"], "is of trajectories and groups"),
        (["--groups", "--trajectories"], "give one of them"),
        (["--evaluations", "--env", "chess"], "the run has addition"),
        (["--reward", "nan:1"], "give one number, or LOW:HIGH"),
        (["--status", ","], "give names with commas between them"),
        (["--trajectories", "--sort", "answer"], "rows can be sorted by trajectory_id, step"),
    ],
)
def test_what_a_run_does_not_have_is_refused_with_what_it_has(
    rollmill: Command, words: list[str], message: str
) -> None:
    assert message in rollmill("inspect", "small", *words)


@pytest.mark.parametrize("words", [[], ["--groups"], ["--trajectories"], ["--evaluations"], ["--group", "5"]])
@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_no_heading_breaks_and_no_line_is_longer_than_the_terminal(
    rollmill: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = rollmill("inspect", "small", *words).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    heading = next(line for line, rule in itertools.pairwise(lines) if rule.startswith("─"))
    assert "…" not in heading
    assert "reward" in heading


def test_a_pipe_gets_every_column_in_full(rollmill: Command) -> None:
    shown = rollmill("inspect", "small", "--trajectories")
    assert "no verdict within 60 s" in shown
    assert "not shown here" not in shown
    assert "…" not in shown


def test_a_selection_without_rows_says_so_in_place_of_an_empty_table(rollmill: Command) -> None:
    words = ("--step", "0", "--reward", "7:")
    assert rollmill("inspect", "small", "--trajectories", *words).splitlines()[1:] == ["none of 16 matches"]
    assert rollmill("inspect", "small", "--groups", *words).splitlines()[1:] == ["no group matches"]


def test_an_empty_table_of_failed_trajectories_names_the_scores_that_failed(rollmill: Command) -> None:
    said = rollmill("inspect", "small", "--group", "6", "--status", "failed").splitlines()[1:]
    command = "rollmill inspect runs/small --status unscored"
    assert said == [f"none of 4 matches; 1 score failed, see {command}"]
    assert "no verdict within 60 s" in rollmill(*command.split()[1:])


def test_a_value_that_rounds_to_nothing_has_no_sign() -> None:
    assert Column("reward").cell({"reward": -0.0001}) == "0.000"


def test_a_table_of_many_rows_says_how_to_see_the_rest(rollmill: Command) -> None:
    assert "5 of 48; --limit 0 shows all" in rollmill("inspect", "small", "--trajectories", "--limit", "5")


@pytest.mark.parametrize("width", [30, 60, 80])
def test_wide_characters_take_two_cells_and_no_line_is_longer_than_the_terminal(width: int) -> None:
    rows = [
        {"env": "算数", "answer": "答えは四十二です。" * 8, "seconds": 1.0},
        {"env": "🧮" * 9, "answer": "42", "seconds": 2.0},
    ]
    columns = (Column("env"), Column("answer", is_text=True), Column("seconds", header="time", rank=1))
    console = Console(file=io.StringIO(), width=width)
    console.print(View({}, "答え", columns, rows).page(width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == (5 if width > 30 else 6), "a row is broken"
    assert max(cell_len(line) for line in lines) <= width
    assert lines[-1].startswith("not shown here: answer, time") == (width == 30)


def test_the_title_is_one_line_and_columns_left_out_are_named_as_they_are_headed(
    rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    title = "runs/small: 3 steps trained, 48 trajectories (1 cancelled, 46 complete, 1 failed)"
    monkeypatch.setenv("COLUMNS", "120")
    assert rollmill("inspect", "small").splitlines()[0] == title
    monkeypatch.setenv("COLUMNS", "50")
    shown = " ".join(rollmill("inspect", "small", "--trajectories").split())
    assert "not shown here: step, env, advantage, tokens, version, seconds, error" in shown


def test_steps_of_an_environment_have_no_figures_of_the_others(rollmill: Command) -> None:
    shown = json.loads(rollmill("inspect", "small", "--env", "calculator", "--json"))
    assert shown["trajectories"] == 24
    assert shown["by_status"] == {"cancelled": 1, "complete": 22, "failed": 1}
    assert [row["survived"] for row in shown["by_step"]] == [8, 7, 7]
    assert all(row.keys().isdisjoint({"lost", "seconds"}) for row in shown["by_step"])
    assert "24 trajectories of calculator (" in rollmill("inspect", "small", "--env", "calculator")


def test_held_out_rewards_are_those_of_the_environment_asked_for(rollmill: Command) -> None:
    whole = json.loads(rollmill("inspect", "small", "--evaluations", "--json"))
    assert json.loads(rollmill("inspect", "small", "--evaluations", "--env", "addition", "--json")) == whole
    of_another = json.loads(rollmill("inspect", "small", "--env", "calculator", "--json"))
    assert of_another["held_out"] == []


@pytest.mark.parametrize(
    ("words", "note"),
    [([], "1 of 3;"), (["--groups"], "1 of 12;"), (["--evaluations"], "1 of 2;")],
)
def test_a_table_of_any_kind_reports_that_it_is_shortened(
    rollmill: Command, words: list[str], note: str
) -> None:
    assert f"{note} --limit 0 shows all" in rollmill("inspect", "small", *words, "--limit", "1")


def test_a_count_of_one_is_singular(rollmill: Command) -> None:
    assert rollmill("inspect", "small", "--groups", "--group", "5").startswith("1 group\n")
    assert rollmill("inspect", "small", "--status", "failed").startswith("1 trajectory, rewards")


def test_an_error_is_shown_with_its_type(rollmill: Command) -> None:
    assert "RequestError: 503 from the server" in rollmill("inspect", "small", "--status", "failed")
