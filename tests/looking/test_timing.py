"""Where the time of a step went, in the viewer: its timeline and the tables of `rollmill spans`."""

import plotly.io
import polars as pl
import pytest
from span_rows import spans_of, whole_step

from rollmill.flows.recipe import run_tokenizer
from rollmill.tasks.look.ledger import step_timeline as module
from rollmill.tasks.look.ledger.step_attribution import build_ledger
from rollmill.tasks.look.ledger.step_timeline import PATH, STEP, lay_out_step
from rollmill.tasks.look.web.app import render_page
from rollmill.tasks.look.web.charts import OTHER, WORK, make_timeline_chart
from rollmill.tasks.look.web.run_data import RunData
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


def test_without_a_step_the_timeline_is_the_mean_of_many(timed: RunData) -> None:
    said = show(timed, "/time")
    assert "mean of 3 steps: 10.00 s" in said
    assert 'timeline"' not in said


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
            for bar in make_timeline_chart(laid_out(step, *rows)).children[1].figure["data"]
        }
        for step in (0, 1)
    )
    assert first["collect"] == second["collect"] != second["evaluate"] == first["evaluate"]
    assert len(set(WORK.values())) == len(WORK)
    assert second["unheard_of"] == OTHER
    assert second["idle"] != OTHER
