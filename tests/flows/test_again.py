"""Stored rollouts scored again, trained from, and replayed: Prefect and the trainer are real, there is no vLLM server.

The rollouts are made up: random answers under the log-probabilities of nobody's policy.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tensorboardX.proto.event_pb2 import Event

from rollmill.tasks.rollout.chat_tokenizer import CHARACTERS
from rollmill.tasks.score.scorers.built_in import AdditionScorer
from rollmill.tasks.store import reader
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import make_logprob_rows
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import dataset_schema, make_batch, ragged_array
from rollmill.tasks.store.verify.run_verification import verify_run

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE = 3, 6, 4
N = STEPS * GROUPS * GROUP_SIZE
FAILED = "r.1.2.0"
SHORT, TEACHER = "short@1", "big"
TEXTS = ("example_id", "error_type", "error", "server", "finish_reason")


def scan(run: Path, dataset: str) -> pl.DataFrame:
    """All rows of a data set as a user's plain scan sees them; none when there is none."""
    files = sorted(run.glob(f"{dataset}/**/*.arrow"))
    return pl.scan_ipc(files).collect() if files else pl.DataFrame()


def make_rollouts(step: int, envs: Sequence[str]) -> pa.RecordBatch:
    """A step's rollouts: answers of 1 to 8 tokens to the prompt 1+1=; the groups are of these environments in turn."""
    rng, kind = np.random.default_rng(step), dataset_schema("rollouts")
    numbers = [(group, sample) for group in range(GROUPS) for sample in range(GROUP_SIZE)]
    answers = [rng.integers(2, 2 + 10, rng.integers(1, 9)) for _ in numbers]
    prompt = np.array([2 + CHARACTERS.index(each) for each in "1+1="])
    columns: dict[str, object] = {
        field.name: [[] if pa.types.is_large_list(field.type) else 0] * len(numbers) for field in kind
    }
    columns |= dict.fromkeys(TEXTS, [""] * len(numbers))
    ids = [f"r.{step}.{group}.{sample}" for group, sample in numbers]
    masks = [np.arange(len(prompt) + len(answer)) >= len(prompt) for answer in answers]
    columns |= {
        "run": ["r"] * len(numbers),
        "step": [step] * len(numbers),
        "group": [step * GROUPS + group for group, _ in numbers],
        "sample": [sample for _, sample in numbers],
        "trajectory_id": ids,
        "env": [envs[group % len(envs)] for group, _ in numbers],
        "example": ['{"problem": "1+1=", "answer": "2"}'] * len(numbers),
        "temperature": [1.0] * len(numbers),
        "status": ["failed" if each == FAILED else "complete" for each in ids],
        "messages": ["[]"] * len(numbers),
        "outcome": ["{}"] * len(numbers),
        "token_ids": ragged_array(
            [np.concatenate([prompt, answer]) for answer in answers], kind.field("token_ids").type
        ),
        "loss_mask": ragged_array(masks, kind.field("loss_mask").type),
        "logprobs": ragged_array(
            [np.where(mask, rng.normal(-4.0, 0.3, len(mask)), np.nan) for mask in masks],
            kind.field("logprobs").type,
        ),
        "n_prompt_tokens": [len(prompt)] * len(numbers),
        "n_completion_tokens": [len(answer) for answer in answers],
    }
    return make_batch("rollouts", columns)


def make_scores(rollouts: pa.RecordBatch) -> pa.RecordBatch:
    """By short@1, which prefers short answers."""
    shown = rollouts.filter(pc.equal(rollouts["status"], "complete"))
    kept = {name: shown[name] for name in ("run", "step", "group", "sample", "trajectory_id")}
    given = {
        "scorer": "short",
        "version": "1",
        "status": "scored",
        "error_type": "",
        "error": "",
        "components": "{}",
        "turn_rewards": [],
        "token_rewards": [],
    }
    given |= {"subgroup": 0, "duration_s": 0.0}
    columns = kept | {name: [value] * shown.num_rows for name, value in given.items()}
    return make_batch("scores", columns | {"reward": [-float(str(n)) for n in shown["n_completion_tokens"]]})


def make_teacher_rows(step: int, rollouts: pa.RecordBatch) -> pa.RecordBatch:
    """A teacher's log-probabilities of a step's rollouts, the sampler's and a little more."""
    values = [np.array(each, np.float32) + 0.25 for each in rollouts["logprobs"].to_pylist()]
    ids = rollouts["trajectory_id"].to_pylist()
    return make_logprob_rows("r", step, [f"{TEACHER}@1"] * len(ids), ids, values)


def make_groups(step: int) -> pa.RecordBatch:
    """A row for each group, which says how many trajectories were asked for."""
    columns: dict[str, object] = {
        field.name: [""] * GROUPS if pa.types.is_string(field.type) else [0] * GROUPS
        for field in dataset_schema("groups")
    }
    columns |= {
        "step": [step] * GROUPS,
        "group": list(range(step * GROUPS, (step + 1) * GROUPS)),
        "expected": [GROUP_SIZE] * GROUPS,
    }
    return make_batch("groups", columns)


def empty(dataset: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=dataset_schema(dataset))


async def write_source(folder: Path, envs: Sequence[str] = ("addition",)) -> None:
    """A run that has sampled and trained three steps, with scores by short@1."""
    opened = OpenRun.open(
        RunFolder(folder),
        config={
            "steps": STEPS,
            "rollout": {"group_size": GROUP_SIZE},
            "score": {"scorer": AdditionScorer.name},
        },
        fixed={},
        versions={},
        git_commit="",
        config_of=StoreConfig(),
    )
    with opened as run:
        async with run.writer:
            for step in range(STEPS):
                rollouts = make_rollouts(step, envs)
                await run.writer.append("rollouts", rollouts, step=step)
                await run.writer.append("scores", make_scores(rollouts), scorer=SHORT, step=step)
                taught = make_teacher_rows(step, rollouts)
                await run.writer.append("logprobs", taught, policy=TEACHER, step=step)
                await run.writer.append("groups", make_groups(step), step=step)
                await run.writer.append("batches", empty("batches"), step=step)
        run.finish()


@pytest.fixture
def source(request: pytest.FixtureRequest, workplace: Any) -> Path:
    """The run; a test may give the environments of its groups as the fixture's parameter."""
    folder = Path(workplace.folder) / "runs" / "source"
    asyncio.run(write_source(folder, getattr(request, "param", ("addition",))))
    workplace.environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    return folder


def kill_when(
    workplace: Any, words: tuple[str, ...], condition: Callable[[], bool], *, evaluates: bool = False
) -> None:
    """Start a command, and end it by SIGKILL when something has happened; unless it evaluates, no vLLM server is seen meanwhile."""
    running = workplace.start(*words)
    deadline = time.monotonic() + 600.0
    while not condition():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline, "it did not happen in time"
        assert evaluates or not [line for line in workplace.processes().values() if "vllm" in line]
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate(timeout=120)
    while workplace.processes():
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)


def test_a_killed_rescoring_resumes_and_scores_every_survivor_once(workplace: Any, source: Path) -> None:
    words = ("rescore", "source", "--scorer", "slow_scorer:SlowScorer", "--set", "groups_per_task=1")
    kill_when(workplace, words, lambda: len(scan(source, "scores/scorer=slow@1")) > 0)
    before = scan(source, "scores/scorer=slow@1")
    assert len(before) < N - 1

    resumed = workplace.run(*words)
    again = workplace.run(*words)

    scores, rollouts = scan(source, "scores/scorer=slow@1"), scan(source, "rollouts")
    survivors = rollouts.filter(pl.col("status") == "complete")
    assert sorted(scores["trajectory_id"]) == sorted(survivors["trajectory_id"])
    assert (
        scores.join(before, on="trajectory_id", how="semi")
        .sort("trajectory_id")
        .equals(before.sort("trajectory_id"))
    )
    joined = scores.join(survivors, on="trajectory_id")
    assert (joined["reward"] == -joined["n_completion_tokens"]).all()
    row = next(line for line in resumed.stdout.splitlines() if line.startswith("│ slow@1"))
    assert row.replace("│", "").split() == ["slow@1", f"{scores['reward'].mean():.4f}", str(N - 1), "0", "0"]
    assert "is complete" in again.stdout


@pytest.mark.parametrize("source", [("addition", "guess")], indirect=True)
def test_the_rows_of_one_environment_are_rescored_alone_and_what_others_have_stays(
    workplace: Any, source: Path
) -> None:
    failed = workplace.run(
        "rescore", "source", "--scorer", "mended_scorer:FailingScorer", "--set", "max_failed_share=1"
    )
    words = ("rescore", "source", "--scorer", "mended_scorer:MendedScorer", "--redo-failed")
    wrong = workplace.run(*words, "--where", "env = 'calculator'")
    redone = workplace.run(*words, "--where", "env = 'guess'")
    again = workplace.run(*words, "--where", "env = 'guess'")
    alone = workplace.run(
        "rescore", "source", "--scorer", "slow_scorer:SlowScorer", "--where", "env = 'guess'"
    )

    assert failed.returncode == redone.returncode == alone.returncode == 0, redone.stdout
    assert wrong.returncode != 0
    assert "no group of" in wrong.stdout
    assert "is complete: every stored trajectory of the groups where env = 'guess'" in again.stdout
    # A plain scan still has the failed scores that were replaced.
    scores = reader.scan(RunFolder(source), "scores", scorer="mended@1").collect()
    by_status = {status: {group % 2 for group in of["group"]} for (status,), of in scores.group_by("status")}
    assert by_status == {"failed": {0}, "scored": {1}}
    assert len(scores) == N - 1
    slow = scan(source, "scores/scorer=slow@1")
    assert len(slow) == N // 2
    assert {group % 2 for group in slow["group"]} == {1}


def test_a_rescoring_that_fails_throughout_ends_with_status_1_until_it_is_redone(
    workplace: Any, source: Path
) -> None:
    failed = workplace.run("rescore", "source", "--scorer", "mended_scorer:FailingScorer")
    again = workplace.run("rescore", "source", "--scorer", "mended_scorer:MendedScorer")
    redone = workplace.run("rescore", "source", "--scorer", "mended_scorer:MendedScorer", "--redo-failed")
    counted = workplace.run(
        "rescore", "source", "--scorer", "digit_scorer:count_digit", "--set", "score.scorer.args.digit=1"
    )

    assert (failed.returncode, again.returncode, redone.returncode) == (1, 1, 0), redone.stdout
    ((key, described),) = read_manifest(RunFolder(source)).scorers.items()
    assert described == 'digit_scorer:count_digit {"digit": 1}'
    assert f"{key} is {described}" in " ".join(counted.stdout.split())
    for printed in (failed.stdout, again.stdout):
        assert re.search(
            r"the first: ValueError: no reward for .*mended_scorer\.py:\d+, in score\)", printed
        ), printed
    scores = scan(source, "scores/scorer=mended@1").filter(pl.col("status") == "scored")
    assert len(scores) == N - 1


@pytest.mark.long
def test_a_killed_comparison_of_scorers_resumes_and_samples_no_token_to_train_on(
    workplace: Any, source: Path, tied_model: Path, stub_python: str
) -> None:
    """The vLLM servers of the evaluations are stubs."""
    settings = {
        "model": tied_model,
        "steps": 2,
        "rollout.environment": "addition",
        "rollout.groups_per_step": 5,
        "rollout.max_completion_tokens": 24,
        "train.dtype": "float32",
        "serve.python": stub_python,
        "serve.max_model_len": 128,
        "evaluate.n_prompts": 32,
    }
    words = ("ab", "source", "--scorer", "length_scorers:short", "--scorer", "length_scorers:long")
    words += tuple(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))
    labels = ["length_scorers.short@1", "length_scorers.long@1"]
    arms = [source.parent / f"source-ab-{each.replace('@', '-')}" for each in labels]
    rollouts = scan(source, "rollouts")

    kill_when(workplace, words, lambda: bool(list(arms[0].glob("batches/*/*.arrow"))), evaluates=True)
    before = scan(arms[0], "batches")
    resumed = workplace.run(*words, "--json")

    assert resumed.returncode == 0, resumed.stdout
    found = json.loads(resumed.stdout[resumed.stdout.index("\n{") :])
    cells = {(each["policy"], each["answers"], each["scorer"]): each for each in found["policies"]}
    assert len(cells) == 2 * 2 * 2
    for (_, _, scorer), cell in cells.items():
        sign = -1.0 if scorer == labels[0] else 1.0
        assert (cell["n"], cell["reward"]) == (32, sign * abs(cell["reward"]))
    # The stubs answer alike whatever the policy is.
    assert {each["difference"] for each in found["differences"]} == {0.0}
    assert found["tokens_sampled"]["training"] == 0 < found["tokens_sampled"]["evaluations"]
    assert len(found["disagreements"]) == 10
    for arm, label in zip(arms, labels, strict=True):
        batches = scan(arm, "batches")
        assert set(batches["scorer"]) == {label}
        assert set(batches["step"]) == {0, 1}
        assert not scan(arm, "rollouts").height
        assert len(scan(arm, "evaluations")) == 2 * 32
        assert not verify_run(RunFolder(arm)).findings
    assert scan(arms[0], "batches").join(before, on=["step", "order"], how="semi").equals(before)
    assert scan(source, "rollouts").equals(rollouts)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_retraining_applies_every_batch_once_writes_its_last_checkpoint_and_replays_to_the_same_bytes(
    workplace: Any, source: Path, tied_model: Path, ranks: int
) -> None:
    new = Path(workplace.folder) / "runs" / "new"
    settings = (
        *("model=" + str(tied_model), "start_model.steps=0", "steps=6", "rollout.groups_per_step=5"),
        *(
            "evaluate.every=0",
            f"train.ranks={ranks}",
            "checkpoint.every=2",
            "checkpoint.keep=3",
            "train.loss=cispo",
            "train.clip_low=1",
            "train.clip_high=4",
            "observe.tensorboard=true",
        ),
    )
    if ranks > 1:
        # Ranks send each other the rows of the teacher, too.
        kl = ("reference=stored", f"teacher={TEACHER}", "coef=0.5", "estimator=k1", "apply_to=advantage")
        settings += tuple(f"train.kl.{each}" for each in kl)
    words = ("retrain", "small", "--from", "source", "--scores", SHORT, "--name", "new")
    words += tuple(word for each in settings for word in ("--set", each))

    kill_when(workplace, words, lambda: len(list(new.glob("batches/*/*.arrow"))) > 2)
    before = scan(new, "batches")
    # Every step keeps the settings that it was trained under, also in the replay across the change.
    changed = (*words, "--set", "train.lr=3e-3", "--set", "train.normalization=sequence")
    resumed = workplace.run(*changed)
    lose_the_end(new)
    ended_again = workplace.run(*changed)
    replayed = workplace.run("replay", "new", "--from", "2")
    verified = workplace.run("verify", "new")

    assert resumed.returncode == 0, resumed.stdout
    assert "on: train.lr: " in resumed.stdout
    assert ended_again.returncode == 0, ended_again.stdout
    assert (new / "checkpoints" / "version=000006" / "COMPLETE.json").is_file()
    assert read_manifest(RunFolder(new)).status == "finished"
    assert updates_shown(new / "tensorboard") == list(range(6))
    check_batches(scan(new, "batches"), before, source)
    metrics = scan(new, "metrics").filter(pl.col("name") == "train/updated")
    assert sorted(metrics["step"]) == list(range(6))
    assert not scan(new, "rollouts").height
    assert verified.returncode == 0, verified.stdout
    assert replayed.returncode == 0, replayed.stdout
    assert "tensors of version 6 are the same, byte for byte" in replayed.stdout


def lose_the_end(run: Path) -> None:
    """Leave a finished run as one that was ended before its last checkpoint."""
    shutil.rmtree(run / "checkpoints" / "version=000006")
    manifest = read_manifest(RunFolder(run))
    write_manifest(open_files(RunFolder(run)), replace(manifest, status="running"), manifest)


def updates_shown(folder: Path) -> list[int]:
    """The steps whose update a run's TensorBoard file has, whose format is: length, crc, event, crc."""
    (path,) = folder.iterdir()
    data, found = path.read_bytes(), []
    while data:
        n = int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12 : 12 + n]), data[16 + n :]
        found += [event.step for each in event.summary.value if each.tag == "train/updated"]
    return found


def check_batches(batches: pl.DataFrame, before: pl.DataFrame, source: Path) -> None:
    """Six batches, the stored ones untouched; rewards are the scores, and no group comes twice in a pass."""
    assert sorted(set(batches["step"])) == list(range(6))
    assert (
        batches.filter(pl.col("step").is_in(set(before["step"])))
        .sort("step", "order")
        .equals(before.sort("step", "order"))
    )
    assert set(batches["source"]) == {str(source)}
    scores = scan(source, f"scores/scorer={SHORT}").select("trajectory_id", "reward")
    joined = batches.join(scores, on="trajectory_id", suffix="_stored")
    assert len(joined) == len(batches)
    assert (joined["reward"] == joined["reward_stored"]).all()
    drawn = batches.group_by("step", "group", "source_step").agg(pl.col("trajectory_id").min())
    first_pass = drawn.filter(pl.col("step") < 3)
    assert first_pass["trajectory_id"].n_unique() == len(first_pass) == 15
