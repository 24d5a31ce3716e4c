"""Several runs side by side: in the viewer, and in one picture."""

import shutil
from collections.abc import Callable
from pathlib import Path

import plotly.io
import pytest

from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.tasks.look.comparisons.run_overlay import overlay_charts
from rollmill.tasks.look.tables.curves import read_curves
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.store.folders import RunFolder

Command = Callable[..., str]


@pytest.fixture
def other(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The run again, without its last evaluation, in runs/other of a folder."""
    folder = RunFolder(tmp_path / "runs" / "other")
    shutil.copytree(small_run.local, folder.local)
    shutil.rmtree(folder.local / "evaluations" / "version=000003")
    return folder


def show(source: RunData, path: str) -> str:
    return plotly.io.json.to_json_plotly(render_page(source, path, ""))


def test_each_run_has_its_lines_and_its_answers_to_the_same_problems(
    small_run: RunFolder, other: RunFolder
) -> None:
    source = RunData(small_run, 0.0, run_tokenizer, [other])
    page = show(source, "/runs")
    for line in ("small held out", "other held out", "other greedy"):
        assert line in page
    assert "sampled: 1 problem in both; mean reward 1.000 of small and 1.000 of other" in page
    assert "greedy: 1 problem in both; mean reward 1.000 of small and 1.000 of other" in page
    both = show(source, "/pair/v3.1.greedy/other:v0.1.greedy")
    assert "other: trajectory v0.1.greedy" in both
    assert "policy version 0, greedy" in both
    assert "the viewer shows small, other" in show(source, "/pair/v3.1.greedy/third:v0.1.greedy")
    assert "no such page" in show(RunData(small_run, 0.0, run_tokenizer), "/runs")


def test_new_data_of_another_run_is_shown(small_run: RunFolder, other: RunFolder) -> None:
    source = RunData(small_run, 0.0, run_tokenizer, [other])
    before = source.revision()
    shutil.rmtree(other.local / "metrics")
    assert source.revision() != before


def test_charts_of_several_runs_have_a_colour_for_each(small_run: RunFolder, other: RunFolder) -> None:
    charts = {
        chart.name: chart for chart in overlay_charts({"a": read_curves(small_run), "b": read_curves(other)})
    }
    assert [*charts] == ["reward", "length", "entropy", "staleness", "drops", "time"]
    assert [each.label for each in charts["length"].series] == ["a", "b"]
    assert len({each.colour for each in charts["reward"].series}) == 2
    # Bars of causes, and of phases, are added up.
    assert charts["drops"].series[0].rows["value"].to_list() == [0.0, 2.0, 1.0]
    assert charts["time"].series[1].rows["value"].round(6).to_list() == [3.0, 3.0, 3.0]


def test_runs_are_drawn_into_one_picture_unless_their_names_are_the_same(
    rollmill: Command, small_run: RunFolder, other: RunFolder, tmp_path: Path
) -> None:
    picture = tmp_path / "both.png"
    rollmill("plot", "small", other.location, "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(small_run.local, tmp_path / "elsewhere" / small_run.name)
    assert "need different names" in rollmill("plot", "small", str(tmp_path / "elsewhere" / small_run.name))
