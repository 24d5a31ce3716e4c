"""Scoring: whatever a scorer does is a row, and only its own."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorer import Reward
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.score.terms import check_scorer
from rollmill.tasks.score.verdict import verdicts_from_result
from rollmill.tasks.store.rows import Rows, column_values
from rollmill.tasks.user_code.plug_in import PlugIn

MakeRows = Callable[[Sequence[str]], Rows]


def config(scorer: str, **settings: object) -> ScoreConfig:
    return ScoreConfig.model_validate({"scorer": f"planted_scorers:{scorer}"} | settings)


async def score(settings: ScoreConfig, rows: Rows) -> dict[str, list]:
    async with Scoring(settings, "run") as scoring:
        scores = await scoring.score(rows, step=3)
    return {name: list(column_values(scores, name)) for name in scores.schema.names}


def alive(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


async def wait_until_gone(pid: int) -> bool:
    return await soon(lambda: not alive(pid))


async def soon(holds: Callable[[], bool]) -> bool:
    for _ in range(6000):
        if holds():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_rows_of_scores_have_the_order_of_the_rollouts(rollouts: MakeRows) -> None:
    rows = await score(config("length", workers=2), rollouts(["a", "bbb", "", "dd"]))
    assert rows["reward"] == [1.0, 3.0, 0.0, 2.0]
    assert rows["sample"] == [0, 1, 2, 3]
    assert set(rows["status"]) == {"scored"}
    assert (rows["run"][0], rows["step"][0], rows["group"][0]) == ("run", 3, 5)
    assert (rows["scorer"][0], rows["version"][0]) == ("planted_scorers.length", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["scaled", "scaled_async", "scaled_group", "Scaled", "an_object", "takes_all"]
)
async def test_a_scorer_has_its_arguments_where_it_runs(name: str, rollouts: MakeRows) -> None:
    scorer = {"name": f"planted_scorers:{name}", "args": {"n": "3", "names": ["a", "b"]}}
    if name == "takes_all":
        scorer["args"]["n"] = 3
    rows = await score(ScoreConfig.model_validate({"scorer": scorer}), rollouts(["a", "b"]))
    assert (rows["reward"], rows["error"]) == ([6.0, 6.0], ["", ""])
    assert rows["version"][0].startswith("3-" if name == "Scaled" else "1-")


async def test_an_async_function_is_scored_on_the_loop(rollouts: MakeRows) -> None:
    rows = await score(config("waits"), rollouts(["a"]))
    assert (rows["reward"], json.loads(rows["components"][0])) == ([1.0], {"tokens": 1.0})


async def test_no_rollouts_are_no_scores(rollouts: MakeRows) -> None:
    assert (await score(config("splits"), rollouts([])))["reward"] == []


def test_a_class_says_its_name_and_version() -> None:
    assert Scoring(config("Graded"), "run").key == "graded@7"


async def test_a_class_may_be_made_from_the_settings_in_a_worker_too(rollouts: MakeRows) -> None:
    rows = await score(config("Configured", judge={"score_range": [0.0, 7.0]}), rollouts(["a"]))
    assert (rows["status"], rows["reward"]) == (["scored"], [7.0])


def test_an_evaluation_may_have_another_scorer() -> None:
    assert Scoring(config("Graded"), "run", scorer=PlugIn(name="exact")).key == "exact@1"


FAILURES = {
    "raise": ("failed", "KeyError", "planted_scorers.py:"),
    "hang": ("failed", "ScoreTimeoutError", "score.timeout_s = 8"),
    "exit": ("failed", "WorkerDiedError", "exit status 3"),
    "segfault": ("failed", "WorkerDiedError", "SIGSEGV"),
    "sys.exit": ("failed", "WorkerDiedError", "exit status 4"),
    "real-time signal": ("failed", "WorkerDiedError", "signal 35"),
    "nan": ("failed", "VerdictError", "finite"),
    "text": ("failed", "VerdictError", "'0.5'"),
    "nothing": ("failed", "VerdictError", "None"),
    "component": ("failed", "VerdictError", "part"),
    "surrogate": ("failed", "ValueError", "?"),
    "drop": ("dropped", "", "too long"),
    "print": ("scored", "", ""),
}


@pytest.mark.slow
async def test_each_failure_is_a_row_with_its_own_cause_and_the_others_are_scored(rollouts: MakeRows) -> None:
    answers = [each for answer in FAILURES for each in (answer, "fine")]
    rows = await score(config("act", timeout_s=8), rollouts(answers))
    found = zip(answers, rows["status"], rows["error_type"], rows["error"], strict=True)
    for answer, status, error_type, error in found:
        expected_status, expected_type, text = FAILURES.get(answer, ("scored", "", ""))
        assert (status, error_type) == (expected_status, expected_type), answer
        assert text in error


async def test_failures_of_an_async_scorer_have_different_types(rollouts: MakeRows) -> None:
    kinds = {
        "hang": "ScoreTimeoutError",
        "timeout": "TimeoutError",
        "cancel": "ScoreError",
        "cancel itself": "ScoreError",
        "sys.exit": "SystemExit",
        "base": "BaseException",
        "raise": "KeyError",
        "fine": "",
    }
    rows = await score(config("act_async", timeout_s=2), rollouts(list(kinds)))
    assert rows["error_type"] == list(kinds.values())


async def test_a_cancelled_flow_is_no_failed_score_of_an_async_scorer(rollouts: MakeRows) -> None:
    async with Scoring(config("act_async"), "run") as scoring:
        hanging = asyncio.create_task(scoring.score(rollouts(["hang"]), step=0))
        await asyncio.sleep(0.05)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging


async def test_a_scorer_that_does_not_close_is_given_up(rollouts: MakeRows) -> None:
    with pytest.raises(ScoreError, match=r"cannot be closed within score\.timeout_s = 0\.1 s"):
        await score(config("ClosesSlowly", timeout_s=0.1), rollouts(["a"]))


@pytest.mark.slow
async def test_a_hundred_hanging_and_crashing_calls_leave_the_flow_healthy(rollouts: MakeRows) -> None:
    bad = ["hang", *["exit", "segfault"] * 9, "sys.exit"]
    answers = bad * 5 + ["fine"] * 8
    async with Scoring(config("act", timeout_s=2.0, workers=2), "run") as scoring:
        scores = await scoring.score(rollouts(answers), step=0)
        metrics = {metric.name: metric.value for metric in scoring.metrics()}
        again = await scoring.score(rollouts(["pid", "pid"]), step=0)
    assert column_values(scores, "status") == ["failed"] * 100 + ["scored"] * 8
    assert column_values(again, "status") == ["scored", "scored"]
    assert metrics["score/workers_restarts"] == 100
    assert metrics["score/workers_timeouts"] >= answers.count("hang")
    assert (metrics["score/workers_active"], metrics["score/workers_depth"]) == (2, 108)


async def test_a_call_whose_worker_is_killed_is_made_once_more(rollouts: MakeRows, tmp_path: Path) -> None:
    answers = ["fine", f"killed once beside {tmp_path / 'killed'}", "fine", "killed", "killed", "fine"]
    async with Scoring(config("act"), "run") as scoring:
        scores = await scoring.score(rollouts(answers), step=0)
        metrics = {metric.name: metric.value for metric in scoring.metrics()}
    assert column_values(scores, "status") == ["scored"] * 3 + ["failed"] * 2 + ["scored"]
    assert column_values(scores, "error_type")[3] == "WorkerKilledError"
    assert metrics["score/workers_restarts"] == 1 + 2 * 2


async def test_metrics_are_those_since_the_last_time(rollouts: MakeRows) -> None:
    async with Scoring(config("length"), "run") as scoring:
        await scoring.score(rollouts(["a", "b"]), step=0)
        first = {metric.name: metric.value for metric in scoring.metrics()}
        second = {metric.name: metric.value for metric in scoring.metrics()}
    assert (first["score/workers_active"], second["score/workers_active"]) == (1, 0)


def kill(pid: int) -> None:
    """Kill a process, and return when it is dead, before the event loop learns of it."""
    os.kill(pid, signal.SIGKILL)
    # A zombie whose other threads have not ended yet holds its sockets open; a process that was collected has none.
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.001)


async def test_a_worker_that_dies_between_calls_is_replaced(rollouts: MakeRows) -> None:
    async with Scoring(config("act"), "run") as scoring:
        pid = int(column_values(await scoring.score(rollouts(["pid"]), step=0), "reward")[0])
        kill(pid)
        scores = await scoring.score(rollouts(["fine"]), step=0)
    assert column_values(scores, "status") == ["scored"]


async def test_workers_and_what_scorers_started_end_with_scoring(rollouts: MakeRows) -> None:
    async with Scoring(config("act"), "run") as scoring:
        scores = await scoring.score(rollouts(["pid", "child"]), step=0)
        worker = int(column_values(scores, "reward")[0])
        child = int(json.loads(column_values(scores, "components")[1])["pid"])
        assert alive(worker)
        assert alive(child)
    assert await wait_until_gone(worker)
    assert await wait_until_gone(child)


async def test_a_cancelled_score_ends_its_worker_and_scoring_continues(
    rollouts: MakeRows, tmp_path: Path
) -> None:
    async with Scoring(config("act"), "run") as scoring:
        pid = int(column_values(await scoring.score(rollouts(["pid"]), step=0), "reward")[0])
        hangs = tmp_path / "hangs"
        hanging = asyncio.create_task(scoring.score(rollouts([f"hang beside {hangs}"]), step=0))
        assert await soon(hangs.exists)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await wait_until_gone(pid)
        assert column_values(await scoring.score(rollouts(["fine"]), step=0), "status") == ["scored"]


FLOW = """
    import asyncio, sys
    from rollmill.tasks.score.scorer import CandidateText
    from rollmill.tasks.score.config import ScoreConfig
    from rollmill.tasks.score.scoring import Scoring

    def candidate(answer):
        return CandidateText("id", "env", "complete", "{}", '[{"role":"assistant","content":"%s"}]' % answer, "{}", 1)

    async def main():
        async with Scoring(ScoreConfig(scorer="planted_scorers:act"), "run") as scoring:
            (pid,) = (await scoring._calls[0].call([[candidate("pid")]]))[0]
            print(int(pid.reward), flush=True)
            await scoring._calls[0].call([[candidate("hang")]])

    asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_hanging_worker_ends_with_a_flow_that_is_killed() -> None:
    flow = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", textwrap.dedent(FLOW)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert flow.stdout is not None
    worker = int(await flow.stdout.readline())
    await asyncio.sleep(0.2)
    assert alive(worker)
    flow.kill()
    await flow.wait()
    assert await wait_until_gone(worker)


async def test_workers_that_cannot_start_stop_the_run() -> None:
    with pytest.raises(ScoreError, match="RuntimeError: not in a worker"):
        async with Scoring(config("OnlyHere"), "run"):
            pass


async def test_workers_that_start_too_slowly_stop_the_run() -> None:
    with pytest.raises(ScoreError, match="not ready within"):
        async with Scoring(config("length"), "run", start_timeout_s=0.001):
            pass


async def test_async_calls_are_bounded(rollouts: MakeRows) -> None:
    from planted_scorers import Slots

    await score(config("Slots", max_in_flight=3), rollouts(["a"] * 20))
    assert Slots.most == 3


async def test_a_groups_scorer_sees_the_group_together(rollouts: MakeRows) -> None:
    assert Scoring(config("ranks"), "run").by_group
    assert (await score(config("ranks"), rollouts(["aaa", "a", "aa"])))["reward"] == [2.0, 0.0, 1.0]


async def test_a_groups_scorer_may_split_it_and_drop_of_it(rollouts: MakeRows) -> None:
    rows = await score(config("splits"), rollouts(["a", "aa", "", "aaa"]))
    assert rows["status"] == ["scored", "scored", "dropped", "scored"]
    assert rows["subgroup"] == [1, 0, 0, 1]
    assert rows["error"][2] == "empty"


async def test_a_groups_scorer_may_drop_the_group_with_a_reason(rollouts: MakeRows) -> None:
    rows = await score(config("splits"), rollouts(["a"]))
    assert (rows["status"], rows["error"]) == (["dropped"], ["alone"])


async def test_too_few_verdicts_fail_the_whole_group(rollouts: MakeRows) -> None:
    rows = await score(config("short"), rollouts(["a", "b"]))
    assert rows["error_type"] == ["VerdictError", "VerdictError"]
    assert "expected 2" in rows["error"][0]


def sum_config(*parts: tuple[str, float], **settings: object) -> ScoreConfig:
    names = [{"scorer": name, "weight": weight} for name, weight in parts]
    return ScoreConfig.model_validate({"sum": names} | settings)


async def test_a_weighted_sum_is_one_scorer_whose_parts_are_components(rollouts: MakeRows) -> None:
    settings = sum_config(("planted_scorers:Graded", 2.0), ("planted_scorers:waits", 0.25), ("exact", 1.0))
    rows = await score(settings, rollouts(["2", "3"]))
    assert rows["reward"] == [2.25, 1.25]
    components = {"graded": 1.0, "planted_scorers.waits": 0.25, "exact": 1.0}
    assert json.loads(rows["components"][0]) == components
    assert rows["scorer"] == ["sum", "sum"]


async def test_a_part_that_fails_fails_the_sum_and_is_named(rollouts: MakeRows) -> None:
    settings = sum_config(("planted_scorers:Graded", 1.0), ("planted_scorers:act", 1.0))
    rows = await score(settings, rollouts(["raise", "drop", "fine"]))
    assert rows["status"] == ["failed", "dropped", "scored"]
    assert rows["error"][0].startswith("planted_scorers.act: ")


async def test_a_sum_with_a_groups_scorer_takes_groups(rollouts: MakeRows) -> None:
    settings = sum_config(("planted_scorers:ranks", 1.0), ("exact", 10.0))
    assert Scoring(settings, "run").by_group
    assert (await score(settings, rollouts(["22", "2"])))["reward"] == [1.0, 10.0]


def test_other_weights_are_another_version() -> None:
    keys = {Scoring(sum_config(("exact", weight)), "run").key for weight in (1.0, 2.0)}
    assert len(keys) == 2


@pytest.mark.parametrize("scorer", ["exakt", "planted_scorers:absent", "json:"])
def test_an_unknown_scorer_is_a_wrong_setting(scorer: str) -> None:
    with pytest.raises(ConfigError, match=r"score\.scorer = .*registered name"):
        Scoring(ScoreConfig(scorer=scorer), "run")


def test_a_part_that_is_not_there_is_named_by_its_number() -> None:
    with pytest.raises(ConfigError, match=r"score\.sum\.1\.scorer"):
        Scoring(sum_config(("exact", 1.0), ("exakt", 1.0)), "run")


def test_the_same_part_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="once"):
        Scoring(sum_config(("exact", 1.0), ("exact", 2.0)), "run")


async def test_rewards_of_turns_are_stored_and_their_sum_is_the_trajectorys(rollouts: MakeRows) -> None:
    rows = await score(config("by_turn"), rollouts(["0.5", "0.5 1", "nan"]))
    assert rows["status"] == ["scored", "failed", "failed"]
    assert (rows["turn_rewards"][0], rows["reward"][0]) == ([0.5], 0.5)
    assert rows["error"][1] == "expected 1 rewards of turns, got 2"
    assert "finite" in rows["error"][2]
    rows = await score(config("by_token"), rollouts(["a"]))
    assert (rows["token_rewards"], rows["reward"]) == ([[2.0]], [2.0])


async def test_a_sum_has_rewards_at_the_finest_level_of_its_parts(rollouts: MakeRows) -> None:
    turns, tokens = ("planted_scorers:by_turn", 2.0), ("planted_scorers:by_token", 3.0)
    rows = await score(sum_config(turns, ("planted_scorers:Graded", 1.0)), rollouts(["4"]))
    assert (rows["turn_rewards"], rows["token_rewards"], rows["reward"]) == ([[8.5]], [[]], [8.5])
    rows = await score(sum_config(turns, tokens), rollouts(["4"]))
    assert (rows["turn_rewards"], rows["token_rewards"], rows["reward"]) == ([[]], [[14.0]], [14.0])


async def test_a_sum_with_rewards_of_tokens_of_rollouts_without_turns_is_a_row(rollouts: MakeRows) -> None:
    rows = rollouts(["4"])
    older = rows.set_column(
        rows.schema.get_field_index("turn_tokens"),
        rows.schema.field("turn_tokens"),
        pa.array([[]], rows.schema.field("turn_tokens").type),
    )
    both = (("planted_scorers:by_token", 3.0), ("planted_scorers:Graded", 1.0))
    found = await score(sum_config(*both), older)
    assert (found["token_rewards"], found["status"]) == ([[6.5]], ["scored"])


def test_no_rewards_of_turns_are_the_reward_0_of_a_trajectory_without_a_turn() -> None:
    (verdict,) = verdicts_from_result(Reward(turns=[]), 1, by_group=False)
    assert (verdict.status, verdict.reward) == ("scored", 0.0)


def test_rewards_of_turns_and_of_tokens_at_once_are_refused() -> None:
    (verdict,) = verdicts_from_result(Reward(turns=[1.0], tokens=[1.0]), 1, by_group=False)
    assert (verdict.status, verdict.error) == ("failed", "expected rewards of turns or of tokens, got both")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=5
)


@given(ANYTHING)
def test_whatever_a_scorer_gives_is_one_verdict_and_only_finite_numbers_are_rewards(thing: object) -> None:
    (verdict,) = verdicts_from_result(thing, 1, by_group=False)
    is_reward = isinstance(thing, bool | int | float) and math.isfinite(thing)
    assert verdict.status == ("scored" if is_reward else "failed")
    assert math.isfinite(verdict.reward) == is_reward


def test_an_unknown_scorer_of_an_evaluation_is_an_error_that_names_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.scorer"):
        Scoring(ScoreConfig(), "run", scorer=PlugIn(name="exakt"))


def test_a_scorer_of_groups_is_refused_for_held_out_trajectories_which_have_none() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.scorer.*one by one"):
        check_scorer(config("ranks"))
    with pytest.raises(ConfigError, match=r"evaluate\.scorer.*one by one"):
        check_scorer(ScoreConfig(scorer="exact"), config("ranks").scorer)
    check_scorer(config("ranks"), PlugIn(name="addition"))
