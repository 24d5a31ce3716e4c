"""A small run on disk, written by the run's writer, whose every figure is known."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from otlp_receiver import Receiver, serve
from span_rows import whole_step
from stored_spans import store_spans

from rollmill.flows import cli
from rollmill.flows.step.lost_trajectories import StoredStepRows, drop_metrics, find_drops
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.rollout.chat_tokenizer import (
    ChatTokenizer,
    save_character_tokenizer,
    tokenize_conversation,
)
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.trajectory import (
    Trajectory,
    TrajectoryRequest,
    Turn,
    rollout_columns,
    rollout_rows,
)
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import (
    batch_rows,
    compute_advantages,
    group_rows,
    survivors_from_rows,
)
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder, partition_folder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import Rows, rows_from_table
from rollmill.tasks.store.run.group_ranges import GroupRange, make_plan_rows
from rollmill.tasks.store.run.manifest import Manifest, write_manifest
from rollmill.tasks.store.schemas import SCHEMA_VERSION, make_batch
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from rollmill.tasks.store.shards.writer import RunWriter
from tests.stubs.toy_settings import toy_config

RUN = "5eed5eed5eed5eed"
STEPS, GROUPS, SAMPLES = 3, 4, 4
N_HELD_OUT = 2
BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)
FAILED = {
    (5, 3): ("failed", "RequestError", "503 from the server"),
    (9, 0): ("cancelled", "Deadline", "cut off"),
}
"""(group, sample) of trajectories that did not end well."""
UNSCORED = (6, 1)
"""(group, sample) of the one whose scorer ran out of time."""


def is_right(group: int, sample: int) -> bool:
    """Group 0 and 3 of a step are all wrong and all right; of the others more are right in later steps."""
    step, place = divmod(group, GROUPS)
    return place == 3 or (place != 0 and sample <= step)


def turns_of(mask: np.ndarray, messages: list[Message]) -> tuple[Turn, ...]:
    """Return the turns of a conversation: its runs of sampled tokens, each with a message of the policy."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    said = [number for number, each in enumerate(messages) if each.role == "assistant"]
    runs = edges.reshape(-1, 2).tolist()
    return tuple(Turn(start, end - start, place) for (start, end), place in zip(runs, said, strict=True))


def trajectory(tokenizer: ChatTokenizer, group: int, sample: int) -> Trajectory:
    """Groups with even numbers are single-turn additions, the others use a tool first."""
    a, b = 10 + group, 20 + group
    answer = f"[{a}+{b}={a + b}]{a + b}" if is_right(group, sample) else f"{a + b + 1 + sample}"
    messages = [Message("user", f"{a}+{b}="), Message("assistant", answer)]
    if group % 2:
        said = Message("assistant", f"<{a}+{b}>")
        messages[1:1] = [said, Message("tool", f"{a + b}", name="calculator")]
    status, error_type, error = FAILED.get((group, sample), ("complete", "", ""))
    if status == "failed":
        messages = []
    ids, mask = (
        tokenize_conversation(tokenizer, messages) if messages else (np.empty(0, np.int32), np.empty(0, bool))
    )
    sampled = np.flatnonzero(mask)
    step = group // GROUPS
    spans = ((int(sampled[0]), step),) if len(sampled) else ()
    if step and sample == 0 and spans:
        spans = ((int(sampled[0]), step - 1), (int(sampled[2]), step))
    logprobs = np.where(mask, -0.1 - 0.5 * (ids % 3), np.nan).astype(np.float32)
    content = {"problem": f"{a}+{b}=", "answer": str(a + b)}
    work = TrajectoryRequest(
        f"{RUN}.{group}.{sample}.0", group, sample, 0, Example(f"{a}+{b}", content), 7 * group + sample, 1.0
    )
    return Trajectory(
        work=work,
        status=status,  # type: ignore[arg-type]
        messages=tuple(messages),
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=spans,
        finish_reason="stop" if messages else "",
        turns=turns_of(mask, messages),
        server=f"http://10.0.0.{1 + sample % 2}:8000",
        started_at=BEGAN + timedelta(seconds=10 * step),
        duration_s=0.5 * (1 + sample),
        generate_s=0.4 * (1 + sample),
        environment_s=0.0,
        queue_s=0.0,
        outcome={"calls": [f"{a}+{b}"]} if group % 2 else {},
        error_type=error_type,
        error=error,
    )


def make_scores(rollouts: Rows, scorer: str) -> Rows:
    """`addition` gives 1 for a right answer and 0.1 for a wrong one; `brevity` takes 0.01 for each sampled token."""
    rows = [row for row in rollouts.to_pylist() if row["status"] == "complete"]
    rewards, parts = [], []
    for row in rows:
        right = is_right(row["group"], row["sample"])
        part = {"format": 0.1, "answer": 0.9 * right} if scorer == "addition" else {}
        parts.append(part)
        rewards.append(sum(part.values()) if part else -0.01 * row["n_completion_tokens"])
    late = [scorer == "addition" and (row["group"], row["sample"]) == UNSCORED for row in rows]
    return make_batch(
        "scores",
        {name: [row[name] for row in rows] for name in ("run", "step", "group", "sample", "trajectory_id")}
        | {
            "scorer": [scorer] * len(rows),
            "version": ["1"] * len(rows),
            "status": ["failed" if each else "scored" for each in late],
            "error_type": ["ScoreTimeoutError" if each else "" for each in late],
            "error": ["no verdict within 60 s" if each else "" for each in late],
            "reward": [float("nan") if each else reward for each, reward in zip(late, rewards, strict=True)],
            "turn_rewards": [[]] * len(parts),
            "token_rewards": [[]] * len(parts),
            "components": [json.dumps(part) for part in parts],
            "subgroup": [0] * len(rows),
            "duration_s": [0.01] * len(rows),
        },
    )


def make_evaluation(tokenizer: ChatTokenizer, version: int) -> Rows:
    """Two held-out problems, greedy and sampled; the second sampled answer is right from version 3 on."""
    trajectories, rewards = [], []
    for greedy in (True, False):
        for prompt in range(N_HELD_OUT):
            each = trajectory(tokenizer, 3 if greedy or prompt == 0 or version == STEPS else 0, prompt)
            kind = "greedy" if greedy else "sampled"
            work = TrajectoryRequest(
                f"{RUN}.v{version}.{prompt}.{kind}",
                1 << 40 | prompt,
                1 - greedy,
                0,
                each.work.example,
                1,
                1.0 - greedy,
            )
            spans = tuple((start, version) for start, _ in each.version_spans)
            fields = {name: getattr(each, name) for name in each.__slots__}
            trajectories.append(Trajectory(**fields | {"work": work, "version_spans": spans}))
            rewards.append(1.0 if greedy or prompt == 0 or version == STEPS else 0.1)
    n = len(rewards)
    return make_batch(
        "evaluations",
        rollout_columns(RUN, version, "addition", trajectories)
        | {"policy_version": [version] * n, "greedy": [True, True, False, False], "reward": rewards}
        | {"components": ["{}"] * n},
    )


def metrics(folder: RunFolder, step: int) -> Rows:
    """What the trainer and the flow measure of a step, as far as people look at it."""
    spans = {
        "collect": 2.0,
        "train": 0.5,
        "evaluate": 0.1,
        "sync": 0.3,
        "step": 3.0,
        "rollouts_and_scores": 2.0,
    }
    every = [Metric(f"time/{name}_s", "all", "value", seconds) for name, seconds in spans.items()]
    every += [Metric("train/updated", "all", "value", 1.0)]
    every += [Metric("train/entropy_nats", env, "mean", 0.8 - 0.1 * step) for env in ("all", "addition")]
    every += drop_metrics(find_drops(StoredStepRows.read(folder, step, "addition@1")))
    columns = {"run": [RUN] * len(every), "step": [step] * len(every)}
    return make_batch(
        "metrics",
        columns
        | {name: [getattr(each, name) for each in every] for name in ("name", "env", "stat", "value")},
    )


async def write_step(folder: RunFolder, writer: RunWriter, tokenizer: ChatTokenizer, step: int) -> None:
    """One step, as the flow writes it."""
    first = step * GROUPS
    await writer.append("plans", make_plan_rows(RUN, step, [GroupRange(first, GROUPS)]), step=step)
    outcomes = []
    for group in range(first, first + GROUPS):
        env = "calculator" if group % 2 else "addition"
        played = [trajectory(tokenizer, group, sample) for sample in range(SAMPLES)]
        rollouts = rollout_rows(RUN, step, env, played)
        await writer.append("rollouts", rollouts, step=step)
        for scorer in ("addition", "brevity"):
            scores = make_scores(rollouts, scorer)
            await writer.append("scores", scores, scorer=f"{scorer}@1", step=step)
            if scorer == "addition":
                survivors = survivors_from_rows(rollouts, scores)
        settings = ScoreConfig(advantage="mean")
        outcomes += compute_advantages(settings, group=group, env=env, expected=SAMPLES, survivors=survivors)
        await writer.append("groups", group_rows(RUN, step, outcomes[-1:], 2.0), step=step)
    await writer.append("batches", batch_rows(RUN, step, outcomes, "addition@1"), step=step)
    await writer.append("metrics", metrics(folder, step), step=step)


def compact(folder: RunFolder, step: int) -> None:
    """Put a step's rollouts in one shard, and leave those that it takes the place of, as in the grace period."""
    rows = rows_from_table(read(folder, "rollouts", step=step))
    name = ShardName(1, 10_000 + step, is_compacted=True)
    write = partial(write_shard, name=name, dataset="rollouts", appended=[rows])
    open_files(folder).publish(f"rollouts/step={step:06d}", write)


async def write_run(folder: RunFolder, model: Path) -> None:
    """Three steps of four groups of four; the first is compacted."""
    settings = toy_config({"steps": STEPS, "model": str(model), "evaluate": {"n_prompts": N_HELD_OUT}})
    folder.tmp.mkdir(parents=True, exist_ok=True)
    write_manifest(
        open_files(folder),
        Manifest(
            run=RUN,
            incarnation=1,
            epoch=1,
            schema_version=SCHEMA_VERSION,
            config=settings.model_dump(mode="json"),
            versions={},
            git_commit="",
            created_at=BEGAN.isoformat(),
            status="finished",
        ),
        None,
    )
    tokenizer = ChatTokenizer.load(model)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for step in range(STEPS):
            await write_step(folder, writer, tokenizer, step)
        for version in (0, STEPS):
            await writer.append("evaluations", make_evaluation(tokenizer, version), version=version)
    compact(folder, 0)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run, in runs/small of a folder."""
    root = tmp_path_factory.mktemp("looked_at")
    folder = RunFolder(root / "runs" / "small")
    asyncio.run(write_run(folder, save_character_tokenizer(root / "model")))
    return folder


REDONE = (5, 3)
"""(group, sample) of the failed trajectory that is there a second time in `redone_run`, and right."""


@pytest.fixture
def redone_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The same run, one failed trajectory of it sampled again, in runs/redone of a folder."""
    folder = RunFolder(tmp_path / "runs" / "redone")
    shutil.copytree(small_run.local, folder.local)
    group, sample = REDONE
    redone = {"sample": sample, "attempt": 1, "trajectory_id": f"{RUN}.{group}.{sample}.1", "reward": 1.0}
    for dataset, outer in {"rollouts": {}, "scores": {"scorer": "addition@1"}}.items():
        rows = read(folder, dataset, step=group // GROUPS, **outer)
        first = rows.filter((pc.field("group") == group) & (pc.field("sample") == 0)).to_pylist()[0]
        made = pa.RecordBatch.from_pylist([first | redone], schema=rows.schema)
        write = partial(write_shard, name=ShardName(2, 0), dataset=dataset, appended=[made])
        open_files(folder).publish(partition_folder(dataset, {**outer, "step": group // GROUPS}), write)
    return folder


@pytest.fixture
def several_answers(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The same run with two sampled answers to each held-out prompt, in runs/several of a folder; the second gets half in version 0."""
    folder = RunFolder(tmp_path / "runs" / "several")
    shutil.copytree(small_run.local, folder.local)
    for version in (0, STEPS):
        rows = read(folder, "evaluations", version=version)
        first = rows.filter(~pc.field("greedy")).to_pylist()
        reward = 1.0 if version else 0.5
        second = [
            row | {"trajectory_id": f"{row['trajectory_id']}2", "sample": 2, "reward": reward}
            for row in first
        ]
        made = pa.RecordBatch.from_pylist(second, schema=rows.schema)
        write = partial(write_shard, name=ShardName(2, 0), dataset="evaluations", appended=[made])
        open_files(folder).publish(partition_folder("evaluations", {"version": version}), write)
    return folder


@pytest.fixture
def small_run_on_s3(
    small_run: RunFolder, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunFolder:
    """The same run, written to S3."""
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    folder = RunFolder(f"{s3_root}/small")
    asyncio.run(write_run(folder, small_run.local.parent.parent / "model"))
    return folder


Command = Callable[..., str]


@pytest.fixture
def rollmill(
    small_run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run `rollmill WORDS` in the folder that holds runs/; returns what it prints, or an error's text."""
    monkeypatch.chdir(small_run.local.parent.parent)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["rollmill", *words])
        with pytest.raises(SystemExit) as end:
            cli.run_command()
        said = capsys.readouterr()
        return said.out if end.value.code == 0 else said.err

    return run


@pytest.fixture
def timed_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """Three steps of ten seconds each, in a copy of the small run."""
    folder = RunFolder(tmp_path / "runs" / "timed")
    shutil.copytree(small_run.local, folder.local)
    store_spans(folder, RUN, *(row for step in range(3) for row in whole_step(step, began=10.0 * step)))
    return folder


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Takes OpenTelemetry's spans."""
    with serve() as server:
        yield server
