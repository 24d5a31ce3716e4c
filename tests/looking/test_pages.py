"""The pages of a run and of a step show the figures, for a run whose every figure is known."""

import pytest

from rollmill.flows.prefect_integration.run_pages import StepPage, run_page, scores_page
from rollmill.tasks.look.tables.notable_trajectories import choose_notable
from rollmill.tasks.store.folders import RunFolder


def test_the_best_and_the_worst_of_a_problem_are_read_and_one_of_the_most_frequent_failure(
    small_run: RunFolder,
) -> None:
    chosen = {each.why: each for each in choose_notable(small_run, 1, "addition@1")}
    assert (chosen["best"].row["reward"], chosen["worst"].row["reward"]) == pytest.approx((1.0, 0.1))
    assert chosen["best"].row["group"] == chosen["worst"].row["group"]
    assert (chosen["failed"].short, chosen["failed"].row["error"]) == ("5.3", "503 from the server")
    assert chosen["failed"].messages == []


def test_a_score_that_failed_is_read_when_no_rollout_did(small_run: RunFolder) -> None:
    failed = [each for each in choose_notable(small_run, 0, "addition@1") if each.why == "failed"]
    assert not failed
    (failed_score,) = [each for each in choose_notable(small_run, 1, "addition@1") if each.why == "failed"]
    assert failed_score.row["error_type"] in ("RequestError", "ScoreTimeoutError")


def test_a_steps_page_shows_its_losses_and_the_commands_to_inspect_them(small_run: RunFolder) -> None:
    before, page = StepPage(small_run, 1, "addition@1", "http://127.0.0.1:4300").around_time()
    assert before.startswith(f"# {small_run.name}, step 1\n")
    assert "| RequestError | 1 |" in page
    assert "### best: [" in page
    assert "(http://127.0.0.1:4300/trajectory/5.3)" in page
    assert f"rollmill inspect {small_run.location} --step 1" in page
    assert f"pl.scan_ipc('{small_run.absolute}/rollouts/step=000001/*.arrow'" in page


def test_without_a_viewer_nothing_is_linked_to(small_run: RunFolder) -> None:
    assert "](" not in "".join(StepPage(small_run, 1, "addition@1").around_time())
    assert run_page(small_run, b"png").count("](") == 1  # the picture


def test_the_page_of_a_run_has_its_plot_its_steps_and_the_command_that_opens_it(small_run: RunFolder) -> None:
    page = run_page(small_run, b"png")
    assert "![curves](data:image/png;base64,cG5n)" in page
    assert "| 3 | 2 | 1.000 (0.342 to 1.000) | 1.000 (0.342 to 1.000) |" in page
    assert f"pl.scan_ipc('{small_run.absolute}/rollouts/**/*.arrow'" in page


def test_the_page_of_scores_has_every_scorer(small_run: RunFolder) -> None:
    page = scores_page(small_run)
    assert r"addition\@1" in page
    assert r"brevity\@1" in page
