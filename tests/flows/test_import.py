"""`rollmill import`: logged conversations become the rollouts of a run, each once, whenever the process is killed."""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from logged_sums import N_ANSWERS, said, write_log

from rollmill.flows.offline.log_import import LogImport
from rollmill.flows.run.live_run import Run
from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.verify.run_verification import verify_run

pytestmark = pytest.mark.service

DEADLINE_S = 120.0
N_PROMPTS = 30


@pytest.mark.long
def test_a_killed_import_resumes_adds_what_is_new_and_has_each_conversation_once(workplace: Any) -> None:
    log = write_log(workplace.folder / "chats.jsonl", range(10, 10 + N_PROMPTS))
    words = ("import", "small", str(log), "--name", "logs")
    sizes = ("--set", f"rollout.group_size={N_ANSWERS}", "--set", "rollout.groups_per_step=8")
    folder = RunFolder(workplace.folder / "runs" / "logs")

    process = workplace.start(*words, *sizes)
    deadline = time.monotonic() + DEADLINE_S
    while not (folder.local / "rollouts").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = workplace.run(*words, *sizes)
    assert done.returncode == 0, done.stdout
    assert said(folder) == sorted(f"{a}-{k}" for a in range(10, 10 + N_PROMPTS) for k in range(N_ANSWERS))
    assert verify_run(folder).findings == []
    manifest = read_manifest(folder)
    assert (manifest.status, manifest.trains, manifest.config["steps"]) == ("finished", False, 4)
    assert len(read(folder, "scores", ["reward"])) == N_PROMPTS * N_ANSWERS
    assert len(read(folder, "groups", ["group"])) == N_PROMPTS

    again = workplace.run(*words, *sizes)
    assert "0 new conversations in 0 groups; 90 are imported already" in again.stdout
    more = write_log(workplace.folder / "more.jsonl", range(10 + N_PROMPTS, 15 + N_PROMPTS))
    added = workplace.run(*words, str(more), *sizes)
    assert added.returncode == 0, added.stdout
    assert "15 new conversations in 5 groups; 90 are imported already" in added.stdout
    assert len(said(folder)) == len(set(said(folder))) == N_ANSWERS * (N_PROMPTS + 5)
    assert verify_run(folder).findings == []


def test_a_broken_log_is_one_line_and_makes_no_run(workplace: Any) -> None:
    log = workplace.folder / "bad.jsonl"
    log.write_text('{"messages": [\n{"messages": []}\n')
    refused = workplace.run("import", "small", "bad.jsonl", "--name", "logs")
    assert refused.returncode == 2
    assert "bad.jsonl:1: this line is no JSON" in " ".join(refused.stdout.replace("'", "").split())
    assert "training the start model" not in refused.stdout
    assert "Traceback" not in refused.stdout
    assert not (workplace.folder / "runs" / "logs").exists()


def test_a_wrong_scorer_begins_no_run_and_one_that_failed_is_repeated(workplace: Any) -> None:
    write_log(workplace.folder / "chats.jsonl", range(10, 12))
    scorer = workplace.folder / "flaky.py"
    scorer.write_text("def score(candidate):\n    raise ValueError('no judge')\n")
    words = ("import", "small", "chats.jsonl", "--name", "logs", "--set", f"rollout.group_size={N_ANSWERS}")
    refused = workplace.run(*words, "--set", "score.scorer=flaky:nosuch")
    assert refused.returncode == 2, refused.stdout
    assert not (workplace.folder / "runs" / "logs").exists()

    failed = workplace.run(*words, "--set", "score.scorer=flaky:score")
    assert failed.returncode == 1, failed.stdout
    assert "--redo-failed" in failed.stdout
    scorer.write_text("def score(candidate):\n    return 1.0\n")
    done = workplace.run(*words, "--set", "score.scorer=flaky:score", "--redo-failed")
    assert done.returncode == 0, done.stdout
    folder = RunFolder(workplace.folder / "runs" / "logs")
    assert read(folder, "scores", ["reward"])["reward"].to_pylist() == [1.0] * 2 * N_ANSWERS
    assert verify_run(folder).findings == []


async def test_what_another_import_stored_meanwhile_is_not_stored_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    shard = tmp_path / "rollouts" / "step=000000" / "a.arrow"
    shard.parent.mkdir(parents=True)
    shard.touch()
    run = SimpleNamespace(
        folder=folder, store=SimpleNamespace(writer=None), environments=[SimpleNamespace(name="")]
    )
    with pytest.raises(StoreError, match="another import has added steps"):
        await LogImport((), 0, 8, Counter()).store(cast(Run, run))
    await LogImport((), 1, 8, Counter()).store(cast(Run, run))
