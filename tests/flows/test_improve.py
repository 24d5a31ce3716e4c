"""The flow improve, killed at moments of one cycle: nothing is done twice, and the alias moves once."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from logged_sums import N_ANSWERS, said, write_log

from rollmill.flows.policies.improvement import Cycle, Improvement
from rollmill.tasks.score.scorer import Candidate
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.promotion.policy_alias import AliasRecord, PolicyAlias, resolve_policy
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.stubs.toy_settings import validate_toy

pytestmark = pytest.mark.service

STEPS = 3
DEADLINE_S = 300.0


def has(folder: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any(folder.glob(pattern))


def kill_when(workplace: Any, words: list[str], is_time: Callable[[], bool]) -> None:
    """Start the command, and end it with all its processes by SIGKILL once it is time."""
    assert not is_time()
    process = workplace.start(*words)
    deadline = time.monotonic() + DEADLINE_S
    while not is_time():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for pid in workplace.processes():
        os.kill(pid, signal.SIGKILL)
    while workplace.processes():
        time.sleep(0.05)


@pytest.mark.parametrize("kills", [(2, 3), pytest.param(range(6), marks=pytest.mark.long)], ids=["2", "6"])
def test_a_cycle_that_is_killed_ends_as_one_that_is_not(
    workplace: Any, stub_python: str, kills: Sequence[int]
) -> None:
    logs, runs = workplace.folder / "chats", workplace.folder / "runs"
    logs.mkdir()
    write_log(logs / "first.jsonl", range(10, 34))
    settings = [
        f"serve.python={stub_python}",
        f"steps={STEPS}",
        f"rollout.group_size={N_ANSWERS}",
        "rollout.groups_per_step=6",
        "evaluate.n_prompts=32",
    ]
    words = ["improve", "small", "chats", "--name", "nightly", "--yes", "--min-reward", "-1"]
    words += [word for each in settings for word in ("--set", each)]
    moments = (
        has(runs, "nightly-logs/rollouts/step=000001/*"),
        has(runs, "nightly-4/run.json"),
        has(runs, "nightly-4/logprobs/policy=trainer/step=000001/*"),
        has(runs, "nightly-4/batches/step=000001/*"),
        has(runs, "nightly-4/policies/version=000003"),
        has(workplace.folder, "policies/gates/*"),
    )
    for number in kills:
        kill_when(workplace, words, moments[number])
    done = workplace.run(*words)
    assert done.returncode == 0, done.stdout

    imported, trained = RunFolder(runs / "nightly-logs"), RunFolder(runs / "nightly-4")
    assert said(imported) == sorted(f"{a}-{k}" for a in range(10, 34) for k in range(N_ANSWERS))
    for folder in (imported, trained):
        assert verify_run(folder).findings == []
        assert read_manifest(folder).status == "finished"
    assert list_steps(trained, "batches") == [*range(STEPS)]
    for step in range(STEPS):
        # Of the policy that answered, however far training has come; once for each row.
        rows = read(trained, "logprobs", ["trajectory_id", "model"], policy="trainer", step=step).to_pydict()
        batch = read(trained, "batches", ["trajectory_id"], step=step)["trajectory_id"].to_pylist()
        assert sorted(rows["trajectory_id"]) == sorted(batch)
        assert {model.rpartition(":")[2] for model in rows["model"]} == {"0"}
    alias = PolicyAlias(str(workplace.folder / "policies" / "production"))
    (moved,) = (record for _, record in alias.history())
    assert moved.policy == str(runs / "nightly-4" / "policies" / "version=000003")
    assert len(list((workplace.folder / "policies" / "gates").iterdir())) == 1

    again = workplace.run(*words)
    assert again.returncode == 0, again.stdout
    assert "nothing new: the policy of cycle 4 was decided on" in again.stdout

    write_log(logs / "second.jsonl", range(40, 46))
    second = workplace.run(*words)
    assert second.returncode == 0, second.stdout
    later = RunFolder(runs / "nightly-5")
    assert read_manifest(later).config["model"] == moved.policy
    assert read_manifest(later).config["retrain"]["where"] == "step >= 4 and step < 5"
    origins = read(later, "batches", ["source_step"])["source_step"].to_pylist()
    assert set(origins) == {4}
    # The stub's answers do not depend on the policy, so none is better or worse: whether it passes is the gate's matter.
    assert ("nightly-5 is blocked" in second.stdout) or ("nightly-5/policies" in second.stdout)


def test_the_scorer_of_the_tutorial_knows_right_sums_and_its_users_are_a_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "improve.md").read_text()
    scorer, users = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(scorer, found)

    def score(answer: str) -> float:
        said = [{"role": "user", "content": "47+38="}, {"role": "assistant", "content": answer}]
        return float(found["right"](Candidate("t", {}, said, is_complete=True, turn_messages=[1])))

    assert [score(each) for each in ("85", "[7+8=15 4+3+1=8]85", "86", "[85]", "")] == [1, 1, 0, 0, 0]
    compile(users, "users.py", "exec")


def begin_cycles(root: Path) -> Improvement:
    """Runs of the cycles 4 and 9 of the improvement nightly, and one that is none."""
    config = validate_toy({"store": {"root": str(root)}, "model": "model"})
    for name, status in (("nightly-4", "finished"), ("nightly-9", "running"), ("nightly-old", "running")):
        (root / name).mkdir()
        manifest = {
            "run": name,
            "incarnation": 0,
            "epoch": 1,
            "schema_version": 4,
            "config": {"steps": 3},
            "versions": {},
            "git_commit": "",
            "created_at": "2026-11-26T00:00:00+00:00",
            "status": status,
        }
        (root / name / "run.json").write_text(json.dumps(manifest))
    return Improvement("nightly", config, PolicyAlias(str(root / "production")), (0.05, 0.05, None))


def test_cycles_are_numbered_by_what_is_imported(tmp_path: Path) -> None:
    improvement = begin_cycles(tmp_path)
    assert improvement.list_numbers() == [4, 9]
    found = improvement.find_open()
    assert found is not None
    assert (found.first_step, found.number, found.run_name) == (0, 9, "nightly-9")
    assert improvement.find_newest() is None


def test_a_cycle_begins_after_the_promoted_one_also_in_a_folder_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    improvement = begin_cycles(tmp_path / "runs")
    policy = resolve_policy(improvement.policy(Cycle(0, 4, "nightly-4"))).absolute

    def promote(previous: str) -> AliasRecord:
        return AliasRecord(
            action="promote", policy=policy, digest="d", run="r", version=3, created_at="", previous=previous
        )

    improvement.alias.move(promote)
    assert improvement.find_open() == Cycle(4, 9, "nightly-9")
