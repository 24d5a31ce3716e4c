"""The gate between an exported policy and production, and the alias that is moved."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_receiver import receive_json
from stored_policies import Rewards, begin_run, draw_rewards, make_policy, store_evaluation

from rollmill.flows import cli
from rollmill.flows.commands.policy_moves import gate_here
from rollmill.flows.policies.policy_gate import PolicyGate
from rollmill.flows.policies.promotion import promote_policy, roll_back
from rollmill.tasks.errors import ConfigError, GateError, StoreError
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.lineage_trace import trace_policy
from rollmill.tasks.store.lineage.policy_lineage import read_lineage
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias

GOOD, EQUAL, WORSE = draw_rewards(1, 600), draw_rewards(2, 600), draw_rewards(3, 600, drop=0.15)
Command = Callable[..., tuple[int, str]]
FILE_OPERATIONS = {"open", "os.mkdir", "os.symlink", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
"""Names of Python's audit events, which come before the operation."""


@pytest.fixture
def workfolder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture
def rollmill(
    workfolder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run `rollmill WORDS`; returns the exit status and what it prints."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["rollmill", *words])
        with pytest.raises(SystemExit) as end:
            cli.run_command()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


def promote(policy: RunFolder, alias: PolicyAlias, by: str = "a person") -> None:
    gate_here(PolicyGate(policy.location, alias.location))
    promote_policy(policy.location, alias, by)


def test_an_equal_policy_is_promoted_and_rolled_back_by_commands(
    workfolder: Path, rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    assert rollmill("gate", first.location)[0] == 0
    status, said = rollmill("promote", first.location, "--yes", "--by", "ada")
    assert status == 0, said
    assert Path("policies/production").resolve() == first.local

    status, said = rollmill("gate", second.location, "--json")
    found = json.loads(said)
    assert (status, found["passed"], found["against"]["version"]) == (0, True, 1)
    assert {(each["answers"], each["n"]) for each in found["checks"]} == {("sampled", 600), ("greedy", 600)}
    assert len({found[each]["rows"] for each in ("candidate", "against")}) == 2
    assert rollmill("promote", second.location, "--yes", "--note", "better words")[0] == 0
    assert (
        Path("policies/production/model.safetensors").read_bytes()
        == second.local.joinpath("model.safetensors").read_bytes()
    )

    assert rollmill("rollback")[0] == 0
    assert Path("policies/production").resolve() == first.local
    status, said = rollmill("rollback")
    assert (status, "no earlier policy" in said) == (2, True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = rollmill("history")[1]
    assert "second/policies/version=000001" in shown, "on 80 columns"
    moves = json.loads(rollmill("history", "--json")[1])["moves"]
    assert [each["action"] for each in moves] == ["rollback", "promote", "promote"]
    assert [each["policy"] for each in moves] == [first.location, second.location, first.location]
    assert (moves[1]["note"], moves[2]["approved_by"]) == ("better words", "ada")
    assert moves[1]["gate"]["checks"] == found["checks"]


def test_a_worse_policy_is_blocked_with_the_reason_and_not_promoted(
    workfolder: Path, rollmill: Command
) -> None:
    first, worse = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "worse", WORSE)
    alias = PolicyAlias("policies/production")
    promote(first, alias)
    status, said = rollmill("gate", worse.location)
    assert status == 1
    assert "blocked" in said
    assert "the margin is 0.05" in said
    status, said = rollmill("promote", worse.location, "--yes")
    assert status == 1
    assert "is blocked: sampled reward: -0.1" in said
    assert Path("policies/production").resolve() == first.local


@pytest.mark.parametrize(
    "settings",
    [
        {
            "retrain": {"sources": ["/other"]},
            "train": {"kl": {"reference": "stored", "teacher": "big", "coef": 1.0}},
        },
        {"retrain": {"sources": ["/other"]}, "train": {"replay_routing": True}},
        {"retrain": {"sources": ["/other"]}, "train": {"ranks": 400}},
        {"executor": {"kind": "ray", "address": "head:6379"}, "serve": {"urls": ["http://h:1"]}},
    ],
)
def test_settings_that_an_evaluation_does_not_read_block_no_policy(
    workfolder: Path, settings: dict[str, Any]
) -> None:
    policy = make_policy(workfolder, "first", GOOD, **settings)
    promote(policy, PolicyAlias("policies/production"))
    assert Path("policies/production").resolve() == policy.local


@pytest.mark.parametrize("unscored", ["candidate", "production"])
def test_an_answer_that_a_scorer_failed_on_blocks_and_is_named(
    workfolder: Path, rollmill: Command, unscored: str
) -> None:
    """An outage of production's scorer would let any candidate pass, one of the candidate's would block it as worse."""
    failed = EQUAL._replace(greedy=np.where(np.arange(600) < 3, np.nan, EQUAL.greedy))
    first = make_policy(workfolder, "first", failed if unscored == "production" else GOOD)
    second = make_policy(workfolder, "second", failed if unscored == "candidate" else GOOD)
    status, said = rollmill("gate", second.location, "--against", first.location)
    where = workfolder / "runs" / ("second" if unscored == "candidate" else "first")
    said = " ".join(said.split())
    assert (status, f"3 held-out answers of version 1 in {where} have no reward" in said) == (1, True), said
    assert f"rollmill evaluate {where} --redo-failed" in said


def test_answers_that_a_scorer_dropped_count_as_wrong_and_do_not_block(workfolder: Path) -> None:
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", None)
    dropped = GOOD._replace(greedy=np.where(np.arange(600) < 3, np.nan, GOOD.greedy))
    run = RunFolder(workfolder / "runs" / "second")
    begin_run_again(run)
    store_evaluation(run, dropped, dropped=True)
    assert gate_here(PolicyGate(second.location, against=first.location)).reasons == ()


def test_a_missing_evaluation_is_made_by_launched_servers_in_a_run_for_its_fixed_settings(
    workfolder: Path,
) -> None:
    first, second = make_policy(workfolder, "first", None), make_policy(workfolder, "second", EQUAL)
    run, gate = RunFolder(workfolder / "runs" / "second"), PolicyGate(second.location, against=first.location)
    before = gate.find_missing()
    begin_run_again(run, serve={"urls": ["http://127.0.0.1:9"]}, seed=5)
    after = PolicyGate(second.location, against=first.location).find_missing()
    assert before is not None
    assert after is not None
    assert after.config.serve.urls == ()
    assert after.run_name != before.run_name
    assert after.run_name in str(gate.explain_unlike(after))


def test_an_evaluation_of_a_run_older_than_a_setting_is_compared_by_its_default(workfolder: Path) -> None:
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    manifest = workfolder / "runs" / "first" / "run.json"
    stored = json.loads(manifest.read_text())
    del stored["config"]["rollout"]["long_prompts"], stored["config"]["score"]["sandbox"]
    manifest.write_text(json.dumps(stored))
    assert PolicyGate(second.location, against=first.location).find_missing() is None


def test_a_policy_needs_a_gate_against_the_one_that_is_in_production_now(workfolder: Path) -> None:
    first, second, third = (
        make_policy(workfolder, name, draw_rewards(seed, 600)) for seed, name in enumerate(("a", "b", "c"))
    )
    alias = PolicyAlias("policies/production")
    with pytest.raises(GateError, match=f"{first.location} was not gated: run `rollmill gate"):
        promote_policy(first.location, alias, "")
    promote(first, alias)
    gate_here(PolicyGate(second.location))
    gate_here(PolicyGate(third.location))
    promote_policy(second.location, alias, "")
    with pytest.raises(GateError, match=f"was not compared with the policy in production, {second.location}"):
        promote_policy(third.location, alias, "")
    with pytest.raises(ConfigError, match="it is the policy that it would be compared with"):
        gate_here(PolicyGate(second.location))


def test_the_start_model_of_a_run_is_exported_gated_and_promoted(workfolder: Path, rollmill: Command) -> None:
    trained = make_policy(workfolder, "first", EQUAL)
    run = RunFolder(workfolder / "runs" / "first")
    store_evaluation(run, GOOD, version=0)
    status, said = rollmill("export-policy", run.location, "models/first", "--version", "0")
    assert (status, "version 0" in said) == (0, True), said
    start = RunFolder(workfolder / "models" / "first")
    lineage = read_lineage(start)
    assert (lineage.version, lineage.steps) == (0, ())
    assert set(lineage.files) == {"config.json"}
    assert trace_policy(start).findings == []
    assert "began with" in (start.local / "README.md").read_text()
    assert rollmill("gate", "models/first", "--min-reward", "0.3")[0] == 0
    assert rollmill("promote", "models/first", "--yes")[0] == 0
    assert Path("policies/production").resolve() == start.local
    status, said = rollmill("gate", trained.location, "--json")
    assert (status, json.loads(said)["against"]["version"]) == (0, 0)


def test_what_is_no_policy_and_what_is_in_production_is_refused_as_a_wrong_argument(
    workfolder: Path, rollmill: Command
) -> None:
    first = make_policy(workfolder, "first", GOOD)
    promote(first, PolicyAlias("policies/production"))
    for command in ("gate", "promote"):
        status, said = rollmill(command, "models/nosuch")
        assert (status, "CANDIDATE = 'models/nosuch'" in said, "export-policy" in said) == (2, True, True), (
            said
        )
    status, said = rollmill("promote", first.location, "--yes")
    assert (status, "it is in production already" in said) == (2, True), said


def test_a_policy_whose_bytes_changed_is_neither_gated_nor_promoted_nor_rolled_back_to(
    workfolder: Path,
) -> None:
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    alias = PolicyAlias("policies/production")
    promote(first, alias)
    gate_here(PolicyGate(second.location))
    weights = second.local / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    for act in (
        lambda: promote_policy(second.location, alias, ""),
        lambda: gate_here(PolicyGate(second.location)),
    ):
        with pytest.raises(
            StoreError, match=r"model\.safetensors: its bytes are not those that were written"
        ):
            act()
    weights.write_bytes(before)
    promote_policy(second.location, alias, "")
    (first.local / "model.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        roll_back(alias, "")
    assert Path("policies/production").resolve() == second.local


def test_another_policy_in_the_folder_of_the_earlier_one_is_not_put_into_production(workfolder: Path) -> None:
    """As `rollmill run NAME --again` moves a run aside, and the next one exports the same version."""
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    alias = PolicyAlias("policies/production")
    promote(first, alias)
    promote(second, alias)
    (workfolder / "runs/first").rename(workfolder / "runs/first-1")
    make_policy(workfolder, "first", WORSE, seed=7)
    with pytest.raises(StoreError, match="was promoted from there: move that policy back"):
        roll_back(alias, "")
    assert Path("policies/production").resolve() == second.local


@pytest.mark.parametrize(("least", "passes"), [(0.55, True), (0.65, False)])
def test_the_first_policy_is_held_to_thresholds_alone(workfolder: Path, least: float, passes: bool) -> None:
    policy = make_policy(workfolder, "first", GOOD)
    record = gate_here(PolicyGate(policy.location, min_reward=least))
    assert (record.passed, record.against) == (passes, None)


def test_an_undecided_comparison_is_blocked_and_says_how_likely_that_was(workfolder: Path) -> None:
    few = draw_rewards(1, 100), draw_rewards(2, 100)
    first, second = (make_policy(workfolder, name, each) for name, each in zip(("a", "b"), few, strict=True))
    promote(first, PolicyAlias("policies/production"))
    record = gate_here(PolicyGate(second.location))
    assert not record.passed
    assert (
        "worse cannot be excluded; an equal policy passes this check with probability 0." in record.reasons[0]
    )


OTHER: dict[str, dict[str, object]] = {
    "other settings": {"temperature": 0.5},
    "another chat template": {"chat_template_kwargs": '{"enable_thinking": false}'},
    "another system prompt": {"prompts": {"system": "Be brief."}},
}


@pytest.mark.parametrize("change", ["no evaluation", *OTHER, "other prompts", "half an evaluation"])
def test_what_cannot_be_compared_is_evaluated_as_the_candidate_was(workfolder: Path, change: str) -> None:
    settings = {"rollout": OTHER.get(change, {})}
    first = make_policy(workfolder, "first", None, **settings)
    run = RunFolder(workfolder / "runs" / "first")
    if change != "no evaluation":
        begin_run_again(run, **settings)
        part = Rewards(GOOD.greedy[:300], GOOD.sampled[:300]) if change == "half an evaluation" else GOOD
        store_evaluation(run, part, first_prompt=1000 if change == "other prompts" else 0)
    second = make_policy(workfolder, "second", EQUAL)
    gate = PolicyGate(second.location, against=first.location)
    missing = gate.find_missing()
    assert missing is not None
    assert missing.config.model == first.location
    assert missing.config.evaluate.n_prompts == 600
    assert missing.config.rollout.temperature == 1.0

    made = RunFolder(f"{missing.config.store.root}/{missing.run_name}")
    assert made.local.parent == workfolder / "runs"
    begin_run(made, first.local, 600, 4)
    store_evaluation(made, GOOD, version=0)
    assert PolicyGate(second.location, against=first.location).find_missing() is None
    record = gate_here(PolicyGate(second.location, against=first.location))
    assert record.against is not None
    assert (record.against.evaluated_in, record.against.evaluated_version) == (made.location, 0)


def begin_run_again(run: RunFolder, **settings: object) -> None:
    """Write run.json of a run of 600 held-out prompts."""
    run.local.joinpath("run.json").unlink()
    begin_run(run, run.local.parent.parent / "model", 600, 4, **settings)


def test_without_a_terminal_or_approval_nothing_is_promoted(
    workfolder: Path, rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_policy(workfolder, "first", GOOD)
    gate_here(PolicyGate(first.location))
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        status, said = rollmill("promote", first.location)
    assert status == 2
    assert "--yes" in said
    assert not Path("policies/production").exists()


def test_a_webhook_is_sent_after_the_move_and_its_failure_undoes_nothing(
    workfolder: Path, rollmill: Command
) -> None:
    first, second = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    gate_here(PolicyGate(first.location))
    with receive_json() as receiver:
        status, _ = rollmill("promote", first.location, "--yes", "--webhook", f"{receiver.url}/moved")
        ((path, _, body),) = receiver.received
        assert (status, path, body["policy"], body["action"]) == (0, "/moved", first.location, "promote")
        receiver.status = 500
        gate_here(PolicyGate(second.location))
        calls = {
            receiver.url: ("promote", second.location, "--yes"),
            f"http://127.0.0.1:{free_port()}": ("rollback",),
        }
        for url, words in calls.items():
            status, said = rollmill(*words, "--webhook", url)
            assert status == 0
            assert f"the webhook {url} failed, and policies/production is moved" in said
    assert Path("policies/production").resolve() == first.local


def test_something_else_of_the_aliass_name_is_left_alone(workfolder: Path) -> None:
    first = make_policy(workfolder, "first", GOOD)
    Path("policies/production").mkdir(parents=True)
    with pytest.raises(ConfigError, match="it is no alias of Rollmill"):
        gate_here(PolicyGate(first.location))
    Path("policies/other").symlink_to(first.local)
    with pytest.raises(ConfigError, match="it is no alias of Rollmill"):
        PolicyAlias("policies/other").current()


def test_a_damaged_record_is_named(workfolder: Path) -> None:
    first = make_policy(workfolder, "first", GOOD)
    alias = PolicyAlias("policies/production")
    promote(first, alias)
    (record,) = Path("policies/.history/production").glob("*/record.json")
    record.write_bytes(record.read_bytes().replace(b"a person", b"b person"))
    with pytest.raises(StoreError, match=r"record\.json is damaged"):
        alias.current()


def promote_in_turn(policies: tuple[str, ...], location: str) -> None:
    """Promote policies one after the other."""
    alias = PolicyAlias(location)
    for policy in policies:
        promote_policy(policy, alias, "")


def promote_and_die(policy: str, location: str, n_operations: int) -> None:
    """Promote a policy, and be killed before a file operation: the one after so many others."""
    left, folder = n_operations, str(Path(location).parent)

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in FILE_OPERATIONS and any(folder in str(each) for each in arguments):
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(count)
    promote_in_turn((policy,), location)


def run_in_fork(call: Callable[..., None], *arguments: object, killed_after_s: float | None = None) -> int:
    """Call a function in a forked process; returns its exit code, -9 if it was killed."""

    def call_and_exit() -> None:
        call(*arguments)
        # Without what other tests registered for the end of their process, which fails in a forked one.
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=call_and_exit)
    process.start()
    if killed_after_s is not None:
        time.sleep(killed_after_s)
        process.kill()
    process.join()
    return process.exitcode or 0


@pytest.fixture
def either(workfolder: Path) -> tuple[RunFolder, RunFolder]:
    """Two policies, each of which may replace the other; the first is in production."""
    both = make_policy(workfolder, "first", GOOD), make_policy(workfolder, "second", EQUAL)
    promote(both[0], PolicyAlias("policies/production"))
    for a, b in (both, both[::-1]):
        assert gate_here(PolicyGate(a.location, against=b.location)).passed
    return both


def other_policy(either: tuple[RunFolder, RunFolder]) -> str:
    """Check that the alias leads to one of two whole policies, by a history of moves between them; returns the other one."""
    moves = [record for _, record in PolicyAlias("policies/production").history()]
    policy = Path("policies/production").resolve()
    assert str(policy) == moves[0].policy
    assert (policy / "model.safetensors").stat().st_size == 2000
    assert all(a.policy != b.policy for a, b in pairwise(moves))
    (other,) = (each for each in either if each.local != policy)
    return other.location


@pytest.mark.slow
def test_killed_before_any_file_operation_the_alias_leads_to_one_whole_policy(
    either: tuple[RunFolder, RunFolder],
) -> None:
    location = str(Path("policies/production").absolute())
    codes = []
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(run_in_fork(promote_and_die, other_policy(either), location, len(codes)))
    assert codes[-1] == 0
    assert len(codes) > 8
    promote_policy(other_policy(either), PolicyAlias(location), "")


@pytest.mark.slow
def test_killed_at_random_moments_the_alias_leads_to_one_whole_policy(
    either: tuple[RunFolder, RunFolder],
) -> None:
    draw = random.Random(0)
    for _ in range(15):
        other = other_policy(either)
        (before,) = (each.location for each in either if each.location != other)
        in_turn = (other, before) * 1000
        killed_after_s = draw.uniform(0.0, 0.2)
        assert (
            run_in_fork(promote_in_turn, in_turn, "policies/production", killed_after_s=killed_after_s)
            == -signal.SIGKILL
        )
    other_policy(either)


@pytest.mark.slow
def test_an_alias_on_s3_is_one_object_and_two_that_move_it_at_once_do_not_both(
    workfolder: Path, s3_root: str
) -> None:
    from rollmill.tasks.store.s3.s3_files import open_objects

    location = f"{s3_root}/policies/production"
    names = ("first", "second")
    there = []
    for name, rewards in zip(names, (GOOD, EQUAL), strict=True):
        policy = make_policy(workfolder, name, rewards)
        there.append(f"{s3_root}/{name}")
        for path in policy.local.iterdir():
            open_objects(RunFolder(there[-1])).upload(path, path.name)
    alias = PolicyAlias(location)
    for each in there:
        gate_here(PolicyGate(each, location))
        promote_policy(each, alias, "")
    assert [record.policy for _, record in alias.history()] == there[::-1]
    roll_back(alias, "")
    current = alias.current()
    assert current is not None
    assert current.policy == there[0]

    def move_meanwhile(previous: str) -> object:
        roll = PolicyAlias(location)
        roll.move(lambda key: current.model_copy(update={"previous": key, "note": "the other's"}))
        return current.model_copy(update={"previous": previous, "note": "ours"})

    with pytest.raises(StoreError, match=r"another process moved .* at the same time"):
        alias.move(move_meanwhile)  # type: ignore[arg-type]  # a record too
    assert next(record.note for _, record in alias.history()) == "the other's"


def test_gates_of_other_rewards_than_right_and_wrong_use_their_range(workfolder: Path) -> None:
    scaled = [Rewards(10 * each.greedy, 10 * each.sampled) for each in (GOOD, EQUAL)]
    first, second = (
        make_policy(workfolder, name, each) for name, each in zip(("a", "b"), scaled, strict=True)
    )
    records = [gate_here(PolicyGate(second.location, against=first.location, margin=m)) for m in (0.05, 0.5)]
    assert [each.passed for each in records] == [False, True]
    lows = np.array([each.low for each in records[1].checks], float)
    assert np.all(lows > -0.5)
