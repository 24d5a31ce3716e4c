"""The suite of benchmarks: what is declared, when a ratio is worse, and that one failure stops nothing."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import model
from benchmarks.run import Suite, run_all
from benchmarks.suite.declared import BENCHMARKS
from benchmarks.suite.figures import Benchmark, Comparison, Figure, KnownMiss, Mode
from benchmarks.suite.process import ROOT, ScriptError, run_script
from benchmarks.suite.regression import (
    BASELINE,
    LEAST_KEPT,
    MOST_KEPT,
    Baseline,
    baselines,
    keep,
    names,
    ratios,
    read_baseline,
    regressions,
    suspects,
)
from benchmarks.suite.results import Result, Results, result_of
from benchmarks.suite.table import PAGE, PageError, between, missed, table

MADE_UP = Benchmark(
    "made_up",
    figures=(
        Figure("speedup", "x", 2.0, more_is_better=True),
        Figure("ratio", "x", 1.1),
        Figure("cpu_ms", "ms", 40.0, peer=Comparison("json", "ways/json/cpu_ms")),
        Figure("noise", "x", is_steady=False),
        Figure("ratio_to_peer", "x", peer=Comparison("a peer"), in_quick=False),
    ),
    quick=(),
)
MODES: tuple[Mode, ...] = ("quick", "full")
STORED = {
    "made_up: speedup": [4.0, 4.4, 3.9],
    "made_up: ratio": [1.0, 1.02, 1.3],
    "made_up: cpu_ms / json": [0.1, 0.1],
}


def values(speedup: float, ratio: float, cpu_ms: float = 50.0) -> dict[str, object]:
    return {
        "speedup": speedup,
        "ratio": ratio,
        "cpu_ms": cpu_ms,
        "noise": 9.0,
        "ways": {"json": {"cpu_ms": 100.0}},
    }


def result(date: str, mode: str, **figures: object) -> Result:
    return Result(
        "made_up", "quick" if mode == "quick" else "full", dict(figures), date, 1.0, "c0ffee", "a machine"
    )


def test_a_ratio_is_the_figure_or_its_ratio_to_a_peer_and_noise_is_none() -> None:
    found = ratios(MADE_UP, values(4.0, 1.0), "quick")
    assert found == {"made_up: speedup": 4.0, "made_up: ratio": 1.0, "made_up: cpu_ms / json": 0.5}
    assert names(MADE_UP, "quick") == list(found)
    assert names(MADE_UP, "full") == [*found, "made_up: ratio_to_peer"]


def test_within_twenty_percent_of_the_median_nothing_is_worse() -> None:
    assert not Baseline((1.0, 1.0, 1.0)).is_worse(1.19)
    assert Baseline((1.0, 1.0, 1.0)).is_worse(1.21)
    assert not Baseline((4.0, 4.0, 4.0), more_is_better=True).is_worse(3.3)
    assert Baseline((4.0, 4.0, 4.0), more_is_better=True).is_worse(3.1)


def test_a_value_within_the_stored_spread_is_not_worse() -> None:
    assert not Baseline((1.0, 1.02, 1.5)).is_worse(1.45)
    assert Baseline((1.0, 1.02, 1.5)).is_worse(1.55)


def test_the_median_of_three_decides() -> None:
    stored = baselines(STORED, MADE_UP, "quick")
    slow, good = (ratios(MADE_UP, values(speedup, 1.0), "quick") for speedup in (2.0, 4.1))
    assert suspects(slow, stored) == ["made_up: speedup"]
    assert regressions([slow, good, good], stored) == {}
    assert regressions([slow, good, slow], stored) == {"made_up: speedup": 2.0}


def test_better_is_never_worse_and_a_ratio_with_two_values_is_not_compared() -> None:
    stored = baselines(STORED, MADE_UP, "quick")
    assert sorted(stored) == ["made_up: ratio", "made_up: speedup"]
    assert suspects(ratios(MADE_UP, values(40.0, 0.1, cpu_ms=1e6), "quick"), stored) == []


def test_another_benchmarks_ratio_of_the_same_name_is_not_compared() -> None:
    assert baselines({"made_up_too: ratio": [0.1, 0.1, 0.1]}, MADE_UP, "quick") == {}


def test_the_baseline_keeps_the_newest_values_of_each_mode(tmp_path: Path) -> None:
    for number in range(12):
        keep({"made_up: ratio": float(number)}, tmp_path / "baseline.json", "quick")
    keep({"made_up: ratio": 0.5}, tmp_path / "baseline.json", "full")
    assert read_baseline(tmp_path / "baseline.json", "quick") == {
        "made_up: ratio": [float(each) for each in range(3, 12)]
    }
    assert read_baseline(tmp_path / "baseline.json", "full") == {"made_up: ratio": [0.5]}


def test_a_figure_that_is_gone_or_no_number_is_missing() -> None:
    assert MADE_UP.missing(values(4.0, 1.0), "quick") == []
    assert MADE_UP.missing(values(4.0, 1.0), "full") == ["ratio_to_peer"]
    assert MADE_UP.missing(values(float("nan"), float("inf")), "quick") == ["speedup", "ratio"]
    assert MADE_UP.missing(values(4.0, 1.0) | {"ways": {}}, "quick") == ["ways/json/cpu_ms"]


def test_a_figure_without_noise_misses_its_target_by_any_difference() -> None:
    exact = Benchmark("made_up", (Figure("share", "x", 1.0, more_is_better=True, is_exact=True),))
    assert exact.missed({"share": 1.0}, "quick") == []
    assert exact.missed({"share": 0.999}, "quick") == ["share is 0.999, target 1"]
    assert names(exact, "full") == []


def test_a_full_run_fails_for_a_missed_target_and_a_known_miss_for_its_own_bound() -> None:
    known = KnownMiss(2.0, "the kernel takes 1 s")
    made_up = Benchmark("made_up", (Figure("cpu_s", "s", 1.0), Figure("wall_s", "s", 1.0, known_miss=known)))
    assert made_up.missed({"cpu_s": 1.1, "wall_s": 2.1}, "quick") == []
    assert made_up.missed({"cpu_s": 0.9, "wall_s": 1.9}, "full") == []
    assert made_up.missed({"cpu_s": 1.1, "wall_s": 2.1}, "full") == [
        "cpu_s is 1.1, target 1",
        "wall_s is 2.1, bound 2 (target 1)",
    ]


def test_the_stored_baseline_is_of_declared_ratios() -> None:
    for mode in MODES:
        stored = read_baseline(BASELINE, mode)
        declared = [
            name for each in BENCHMARKS for name in names(each, mode) if each.arguments(mode) is not None
        ]
        assert stored.keys() - set(declared) == set()
        assert all(0 < len(each) <= MOST_KEPT for each in stored.values())


def test_each_ratio_of_a_quick_run_has_a_baseline() -> None:
    stored = read_baseline(BASELINE, "quick")
    declared = [name for each in BENCHMARKS for name in names(each, "quick") if each.quick is not None]
    assert [name for name in declared if len(stored.get(name, [])) < LEAST_KEPT] == []


async def test_a_failed_script_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    scripts = [Benchmark(name, (), quick=()) for name in ("no_such_script", "suite.figures", "model")]
    outcome = await run_all(scripts, Suite("quick", results, tmp_path / "baseline.json"))
    assert "No module named" in outcome.failed["no_such_script"]
    assert "no JSON object" in outcome.failed["suite.figures"]
    assert [each.script for each in Results(tmp_path / "results.json")] == ["model"]


async def test_a_script_that_lacks_a_declared_figure_has_failed(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    lacking = Benchmark("model", (Figure("flow_s_a_task", "s"), Figure("no_such_figure", "s")), quick=())
    outcome = await run_all([lacking], Suite("quick", results, tmp_path / "baseline.json"))
    assert outcome.failed == {"model": "printed no finite number for no_such_figure"}
    assert not list(results)


async def test_a_script_whose_exact_figure_misses_has_failed_and_its_result_is_kept(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    missing = Benchmark("model", (Figure("flow_s_a_task", "s", 0.0, is_exact=True),), quick=())
    outcome = await run_all([missing], Suite("quick", results, tmp_path / "baseline.json"))
    assert re.fullmatch("flow_s_a_task is .*, target 0", outcome.failed["model"])
    assert [each.script for each in results] == ["model"]


async def test_a_ratio_that_stays_worse_is_measured_three_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"quick": {"model: flow_s_a_task": [1e-9, 1e-9, 1e-9]}}))
    watched = Benchmark("model", (Figure("flow_s_a_task", "x"), Figure("pack_s_a_row", "x")), quick=())
    outcome = await run_all([watched], Suite("quick", Results(tmp_path / "results.json"), baseline))
    assert list(outcome.worse) == ["model: flow_s_a_task"]
    assert outcome.unguarded == ["model: pack_s_a_row"]
    assert capfd.readouterr().out.count("measured again") == 2


async def test_a_script_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ScriptError, match=r"not done after 0\.01 s"):
        await run_script("model", (), timeout_s=0.01)


def test_each_figure_is_of_the_newest_result_and_each_ratio_of_the_same(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.keep(result("2026-01-01 10:00", "full", **values(4.0, 1.2)))
    results.keep(result("2026-01-02 10:00", "quick", speedup=1.5, cpu_ms=30.0))
    lines = table([MADE_UP], results).splitlines()
    assert lines[2] == "| `made_up` | `speedup` | 1.50 | ≥ 2 | **missed** |  |  | 2026-01-02, quick |"
    assert lines[3] == "|  | `ratio` | 1.20 | ≤ 1.1 | **missed** |  |  | 2026-01-01, full |"
    assert lines[4] == "|  | `cpu_ms` | 30.0 ms | ≤ 40 ms | met |  |  | 2026-01-02, quick |"
    results.keep(result("2026-01-03 10:00", "full", **values(4.0, 1.2, cpu_ms=25.0)))
    lines_of_one = table([MADE_UP], results).splitlines()
    assert lines_of_one[4] == "|  | `cpu_ms` | 25.0 ms | ≤ 40 ms | met | 0.250 x json |  | 2026-01-03, full |"
    assert "Of 3 targets 1 are met, 2 missed, 0 not run." in lines


def test_what_never_ran_says_so(tmp_path: Path) -> None:
    lines = table([MADE_UP], Results(tmp_path / "results.json"))
    assert "| `made_up` | `speedup` |  | ≥ 2 | not run |  |  |  |" in lines


def test_a_result_has_machine_versions_and_date(tmp_path: Path) -> None:
    begun = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    kept = result_of("made_up", "quick", {"ratio": 1.0}, begun, "c0ffee")
    Results(tmp_path / "results.json").keep(kept)
    (again,) = Results(tmp_path / "results.json")
    assert again == kept
    assert again.date == "2026-01-02 03:04"
    assert re.match(r"\d+ cores, .+ GiB, Linux", again.machine)
    assert again.versions["prefect"].startswith("3.8")
    assert again.priority == "ordinary"
    assert again.commit == "c0ffee"


def test_results_of_both_modes_name_their_machine_and_commit(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.keep(result("2026-01-01 10:00", "full", ratio=1.2))
    results.keep(result("2026-01-02 10:00", "quick", speedup=1.5))
    text = table([MADE_UP], results)
    assert "- a machine: `made_up` quick, `made_up` full at c0ffee." in text


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(PageError, match="<!-- end of table -->"):
        between("<!-- table -->\n", "table", "")


def test_the_page_is_what_results_say() -> None:
    page, results = PAGE.read_text(), Results()
    written = between(between(page, "table", table(BENCHMARKS, results)), "model", model.text(results))
    assert written == page, "run `python -m benchmarks.run table`"
    assert between(page, "missed", missed(BENCHMARKS, results)) == page, (
        "run `python -m benchmarks.run table`"
    )


def test_a_missed_target_is_listed_with_its_value_and_the_wanted_one(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.keep(result("2026-01-01 10:00", "full", **values(4.0, 1.2, cpu_ms=41.5)))
    assert missed([MADE_UP], results).splitlines() == [
        "2 of 3 targets of our own are missed:",
        "",
        "- `made_up`: `ratio` 1.20, wanted 1.1",
        "- `made_up`: `cpu_ms` 41.5 ms, wanted 40 ms",
    ]


def test_a_known_miss_is_listed_with_its_reason_and_bound(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    results.keep(result("2026-01-01 10:00", "full", wall_s=1.5))
    known = Figure("wall_s", "s", 1.0, known_miss=KnownMiss(2.0, "the kernel takes 1 s"))
    assert missed([Benchmark("made_up", (known,))], results).splitlines()[2:] == [
        "- `made_up`: `wall_s` 1.50 s, wanted 1 s; the kernel takes 1 s, bound 2 s"
    ]


def test_every_script_is_declared_once() -> None:
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} - {"run", "model"}
    declared = [each.script for each in BENCHMARKS]
    assert len(declared) == len(set(declared))
    assert scripts - set(declared) == set()


def test_constants_are_lines_through_what_was_measured(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    calls = {"calls_1": 1.0, "calls_16": 1.15, "calls_64": 1.63}
    results.keep(Result("submission", "quick", calls, "2026-01-01 10:00", 1.0, "", ""))
    found = model.constants(results)
    assert found["calls_a_server"] == pytest.approx(0.01)
    assert found["calls_at_once"] == pytest.approx(0.99)
    assert "flow_s_a_task" not in found
    assert "not run" in model.text(results)


def test_costs_by_group_are_proportional_to_the_number_of_groups() -> None:
    given = model.constants(Results())
    for part in model.PARTS:
        if part.law.startswith(("2 P G", "P ", "P G")) and given.keys() >= set(part.needs):
            base, grown = (part.cost(work, given) for work in (model.BASE, model.GROWN["10 x groups"]))
            assert grown == pytest.approx(10 * base), part.name


def test_a_trajectory_costs_what_a_step_without_task_runs_costs_less_its_rows(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    persist = {"rows": 256, "bytes": 256e5, "rows_cpu_ms": 90.0, "cpu_ms": 38.0}
    for script, figures in (
        ("step_overhead", {"flow_cpu_events_s": 1.024, "trajectories": 512}),
        ("persist", persist),
        ("handoff", {"rows": 128, "bytes": 128e7, "cpu_s": 1.28}),
    ):
        results.keep(Result(script, "quick", figures, "2026-01-01 10:00", 1.0, "", ""))
    found = model.constants(results)
    assert found["flow_s_a_trajectory"] + found["store_s_a_row"] == pytest.approx(0.002)
    assert 0.0 < found["store_s_a_row"] < 0.002


def test_the_default_flow_is_the_sum_of_its_shares() -> None:
    given = {
        "flow_s_a_task": 3e-3,
        "flow_s_a_trajectory": 1e-3,
        "store_s_a_row": 4e-4,
        "store_s_a_byte": 2e-9,
    }
    whole, *shares = (part.cost(model.BASE, given) for part in model.PARTS[:4])
    assert all(part.name.startswith("of it") for part in model.PARTS[1:4])
    assert whole == pytest.approx(sum(shares))
