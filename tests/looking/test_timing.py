"""Where the time of steps went, in the viewer: bars of steps, the timeline of one, and the tables of `rollmill spans`."""

from itertools import combinations

import numpy as np
import plotly.io
import polars as pl
import pytest
from span_rows import spans_of, whole_step

from rollmill.flows.configuration.recipe import run_tokenizer
from rollmill.tasks.look.ledger import step_timeline as module
from rollmill.tasks.look.ledger.step_attribution import build_ledger
from rollmill.tasks.look.ledger.step_timeline import PATH, STEP, lay_out_step
from rollmill.tasks.look.tables.ledger_tables import MOST_OWNERS, OTHERS, sum_step_owners
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.run_data import RunData
from rollmill.tasks.look.web.time_charts import OTHER, PATTERNS, WORK, make_step_bars, make_timeline_chart
from rollmill.tasks.store.folders import RunFolder

SERVER = "http://10.0.0.1:8000"


@pytest.fixture
def timed(timed_run: RunFolder) -> RunData:
    return RunData(timed_run, 0.0, run_tokenizer)


def show(source: RunData, path: str, search: str = "") -> str:
    return plotly.io.json.to_json_plotly(render_page(source, path, search))


def laid_out(step: int, *rows: tuple[object, ...]) -> module.StepTimeline:
    spans = spans_of(*rows)
    return lay_out_step(spans, step, build_ledger(spans, [step]).path)


def test_each_process_has_a_lane_and_the_steps_line_is_all_of_the_step() -> None:
    laid = laid_out(1, *whole_step(0), *whole_step(1, began=10.0))
    assert laid.lanes == [STEP, PATH, "trainer/0", "trainer/1", SERVER]
    seconds = dict(laid.pieces.group_by("lane").agg(pl.col("seconds").sum()).rows())
    assert seconds[STEP] == seconds[PATH] == pytest.approx(10.0)
    forward = laid.pieces.filter(lane="trainer/1", name="forward").row(0, named=True)
    assert (forward["start_s"], forward["seconds"]) == (pytest.approx(6.2), pytest.approx(2.3))
    assert (laid.n_processes, laid.n_pieces) == (0, 0)


def test_of_many_processes_the_first_of_each_kind_are_drawn_and_the_others_counted() -> None:
    rows = [(0, "flow", "step", "step", 0, 10)]
    rows += [(0, f"trainer/{rank}", "main", "forward", 0, 10) for rank in range(30)]
    rows += [(0, f"http://10.0.0.{n}", "main", "generating", 0, 10) for n in range(4)]
    laid = laid_out(0, *rows)
    assert laid.lanes[2:5] == ["trainer/0", "trainer/1", "trainer/2"]
    assert sum(lane.startswith("http") for lane in laid.lanes) == 4
    assert laid.n_processes == 34 - (len(laid.lanes) - 2) == 10


def test_the_longest_stretches_are_drawn_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", 5)
    laid = laid_out(0, *whole_step())
    assert len(laid.pieces) == 5
    assert laid.n_pieces > 5
    assert laid.pieces["seconds"].min() >= 2.3


def test_a_steps_page_has_its_timeline_and_the_tables_of_rollmill_spans(timed: RunData) -> None:
    said = show(timed, "/time", "?step=1")
    for text in (
        "timeline",
        "waiting_for_stragglers",
        "critical path",
        "what would shorten a step",
        "step 2",
    ):
        assert text in said, text


def test_without_a_step_the_tables_are_of_the_mean_and_the_timeline_of_the_newest(timed: RunData) -> None:
    said = show(timed, "/time")
    assert "mean of 3 steps: 10.00 s" in said
    assert "tables of steps 0 to 2" in said
    assert "timeline of step 2" in said


def test_the_tables_are_folded_below_the_charts(timed: RunData) -> None:
    charts, *rest = render_page(timed, "/time", "?step=1").children[1:]
    assert [type(each).__name__ for each in charts.children] == ["Figure", "Div", "Figure"]
    tables = [each for each in rest if type(each).__name__ == "Details"]
    assert len(tables) >= 4
    assert all(getattr(each, "open", None) is None for each in tables)
    assert "<table" not in str(rest[0]).lower()


def test_the_bar_of_a_step_is_its_seconds_by_what_is_on_its_critical_path(timed: RunData) -> None:
    ledger = build_ledger(spans_of(*whole_step(0), *whole_step(1, began=10.0)))
    owners = sum_step_owners(ledger.path)
    bars = make_step_bars(owners, 1).children[1].figure
    heights = np.sum([np.array(each["y"]) for each in bars["data"] if each["x"] == [0, 1]], axis=0)
    rest = [
        (x, y)
        for each in bars["data"]
        if each["x"] != [0, 1]
        for x, y in zip(each["x"], each["y"], strict=True)
    ]
    for step, seconds in rest:
        heights[step] += seconds
    assert heights == pytest.approx([10.0, 10.0])
    of_step = dict(owners.filter(step=1).select("name", "seconds").rows())
    assert of_step["generating"] == pytest.approx(5.0)
    assert next(iter(of_step)) == "generating"
    assert (bars["layout"]["shapes"][0]["x0"], bars["layout"]["shapes"][0]["x1"]) == (0.5, 1.5)
    assert "%{y:.3f} s" in bars["data"][0]["hovertemplate"]


def test_of_many_names_the_largest_have_a_bar_and_the_others_one_together() -> None:
    rows = [(0, "flow", "step", "step", 0, 210)]
    began = 0.0
    for number in range(1, 21):
        rows.append((0, "flow", "step", f"work {number:02}", began, began + number))
        began += number
    owners = sum_step_owners(build_ledger(spans_of(*rows)).path)
    assert owners["name"].to_list() == [
        *(f"work {each:02}" for each in range(20, 20 - MOST_OWNERS, -1)),
        OTHERS,
    ]
    assert owners["seconds"].sum() == pytest.approx(210.0)


def test_a_chosen_step_is_among_its_neighbours(timed: RunData) -> None:
    said = show(timed, "/time", "?step=1")
    assert "timeline of step 1" in said
    assert "tables of step 1" in said
    assert '"x":[0,1,2]' in said.replace(" ", "")


def test_a_run_without_spans_is_reported(small_run: RunFolder, timed: RunData) -> None:
    assert "it has no stored spans" in show(RunData(small_run, 0.0, run_tokenizer), "/time")
    for asked, why in (("7", "it has spans of steps 0 to 2"), ("abc", "give one number, or LOW:HIGH")):
        said = show(timed, "/time", f"?step={asked}")
        assert why in said
        assert "where the time goes" in said
        assert "newest step" in said


def test_a_phase_has_the_same_colour_in_every_step() -> None:
    rows = [(0, "flow", "step", "collect", 0, 9), (0, "flow", "step", "evaluate", 9, 10)]
    rows += [(1, "flow", "step", "evaluate", 10, 19), (1, "flow", "step", "collect", 19, 20)]
    rows += [(1, "trainer/0", "main", "idle", 10, 12), (1, "trainer/0", "main", "unheard_of", 12, 13)]
    first, second = (
        {
            bar["name"]: bar["marker"]["color"]
            for bar in make_timeline_chart(laid_out(step, *rows), step).children[1].figure["data"]
        }
        for step in (0, 1)
    )
    assert first["collect"] == second["collect"] != second["evaluate"] == first["evaluate"]
    assert len(set(WORK.values())) == len(WORK)
    assert second["unheard_of"] == OTHER
    assert second["idle"] != OTHER


# Machado, Oliveira and Fernandes (2009): linear RGB as people see it without red, green or blue cones.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear_rgb(colour: str) -> np.ndarray:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_colour_blind_people_distinguish_the_colours_of_work_and_the_grounds(blindness: str) -> None:
    light, dark = "#ffffff", "#14181d"
    colours = [*dict.fromkeys(colour for colour, _ in WORK.values()), light, dark]
    seen = {each: lab(np.array(BLINDNESS[blindness]) @ linear_rgb(each)) for each in colours}
    distances = {
        pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(colours, 2)
    }
    # A difference of 2.3 is just noticeable side by side; bars are apart.
    assert min(distances.values()) > 15, min(distances, key=distances.__getitem__)


def test_each_pattern_of_a_bar_is_in_the_legend_too(timed: RunData) -> None:
    assert {pattern for _, pattern in WORK.values() if pattern} == set(PATTERNS)
    said = show(timed, "/time")
    assert "repeating-linear-gradient" in said
    assert WORK["storing"][1] == "/"
