"""`rollmill plot`: the curves of a run, and a picture of those that exist."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from rollmill.tasks.look.tables.curves import Curves, list_charts, read_curves
from rollmill.tasks.look.terminal.plot import draw
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest

Command = Callable[..., str]
PNG = b"\x89PNG\r\n\x1a\n"


def test_curves_are_those_of_the_data_sets(small_run: RunFolder) -> None:
    curves = read_curves(small_run)
    assert curves.groups["reward"].round(3).to_list() == [0.438, 0.55, 0.644]
    assert curves.by_env.filter(pl.col("env") == "addition")["reward"].round(3).to_list() == [
        0.213,
        0.25,
        0.438,
    ]
    assert curves.held_out["reward"].to_list() == [0.55, 1.0]
    assert curves.training["entropy"].round(3).to_list() == [0.8, 0.7, 0.6]
    assert curves.staleness["max"].to_list() == [0, 1, 1]
    assert curves.staleness["mean"].round(3).to_list() == [0.0, 0.267, 0.25]
    assert curves.drops.select("step", "cause", "n").rows() == [
        (2, "Deadline", 1.0),
        (1, "RequestError", 1.0),
        (1, "ScoreTimeoutError", 1.0),
    ]
    assert curves.spans.select(pl.exclude("step").round(6)).unique().rows() == [(2.0, 0.5, 0.1, 0.3, 0.1)]


def test_a_collected_run_has_no_staleness(small_run: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "collected")
    shutil.copytree(small_run.local, folder.local)
    whole = read_manifest(folder)
    write_manifest(open_files(folder), replace(whole, trains=False), whole)
    curves = read_curves(folder)
    assert curves.staleness.is_empty()
    assert list_charts(replace(curves, training=curves.training.clear()))


def test_staleness_that_is_always_zero_gives_its_place_to_the_gradient_norm(small_run: RunFolder) -> None:
    whole = read_curves(small_run)
    names = ["reward", "length", "entropy", "staleness", "drops", "time"]
    assert [chart.name for chart in list_charts(whole)] == names
    fresh = replace(whole, staleness=whole.staleness.with_columns(pl.col("max", "mean") * 0))
    assert [chart.name for chart in list_charts(fresh)][3] == "gradient norm"
    untrained = replace(fresh, training=whole.training.clear())
    assert [chart.name for chart in list_charts(untrained)] == names


def test_a_run_is_drawn_into_its_folder_or_to_a_given_path(rollmill: Command, tmp_path: Path) -> None:
    assert rollmill("plot", "small") == "runs/small/plot.png\n"
    assert Path("runs/small/plot.png").read_bytes().startswith(PNG)
    picture = tmp_path / "new" / "curves.png"
    rollmill("plot", "small", "--output", str(picture))
    assert picture.read_bytes().startswith(PNG)
    assert "the picture cannot be written" in rollmill(
        "plot", "small", "--output", str(picture / "below.png")
    )


def test_a_pictures_suffix_is_its_format(rollmill: Command, tmp_path: Path) -> None:
    picture = tmp_path / "curves.jpg"
    rollmill("plot", "small", "--output", str(picture))
    assert picture.read_bytes().startswith(b"\xff\xd8\xff")
    output = rollmill("plot", "small", "--output", str(tmp_path / "curves.gif"))
    assert "give a name that ends in .png, .svg, .pdf, .jpg" in output


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of what other tests left
@pytest.mark.parametrize("n_steps", [0, 1, 2])
def test_a_run_of_few_steps_is_drawn_without_a_warning(
    small_run: RunFolder, tmp_path: Path, n_steps: int
) -> None:
    whole = read_curves(small_run)
    curves = Curves(
        **{name: getattr(whole, name).filter(pl.col("step") < n_steps) for name in Curves.__slots__}
    )
    draw("run", curves).savefig(tmp_path / "run.png")


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of what other tests left
def test_steps_without_a_reward_are_gaps(small_run: RunFolder, tmp_path: Path) -> None:
    whole = read_curves(small_run)
    names = ("groups", "by_env", "training", "staleness")
    gone = {name: getattr(whole, name).with_columns(pl.selectors.float() * float("nan")) for name in names}
    draw("run", Curves(**{name: gone.get(name, getattr(whole, name)) for name in Curves.__slots__})).savefig(
        tmp_path / "run.png"
    )
