"""Whatever is done to a stored run is found, and said with the file and a remedy."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import (
    CheckpointMarker,
    check_files,
    describe_file,
    parse_marker,
)
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.environment_states import state_row
from rollmill.tasks.store.filesystem import open_files, publish_text
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.group_draw import StoredGroup
from rollmill.tasks.store.reader import read, read_shard
from rollmill.tasks.store.run.fork_copy import fork_run
from rollmill.tasks.store.run.group_ranges import GroupRange, make_plan_rows
from rollmill.tasks.store.run.manifest import read_manifest, write_manifest
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.shards.inventory import list_shard_sizes
from rollmill.tasks.store.verify import run_views
from rollmill.tasks.store.verify.run_verification import verify_run

RowMaker = Callable[..., pa.RecordBatch]
Writing = Callable[[], AbstractContextManager[None]]
REPOSITORY = Path(__file__).parents[2]
GROUPS, SIZE, STEPS = 2, 2, 2
CONFIG: dict[str, Any] = {
    "steps": STEPS,
    "rollout": {"group_size": SIZE, "max_staleness": 0},
    "evaluate": {"every": 2, "n_prompts": 1},
}

FILE = "rank-00000-of-00001.safetensors"


def make_columns(step: int) -> dict[str, object]:
    """Columns of a step's rollouts: two tokens of the prompt, then two sampled ones."""
    keys = [(step * GROUPS + group, sample) for group in range(GROUPS) for sample in range(SIZE)]
    n = len(keys)
    return {
        "step": step,
        "group": [group for group, _ in keys],
        "sample": [sample for _, sample in keys],
        "trajectory_id": [f"r.{group}.{sample}" for group, sample in keys],
        "attempt": 0,
        "status": "complete",
        "policy_version_first": step,
        "policy_version_last": step,
        "version_span_starts": [[2]] * n,
        "version_span_versions": [[step]] * n,
        "token_ids": [[5, 6, 7, 8]] * n,
        "loss_mask": [[False, False, True, True]] * n,
        "logprobs": [[np.nan, np.nan, -0.5, -1.5]] * n,
        "n_prompt_tokens": 2,
        "n_completion_tokens": 2,
    }


class Story:
    """A run that a test composes: `columns` may be changed before they are written."""

    def __init__(self, root: Path, rows: RowMaker) -> None:
        self.folder, self._root, self._rows = RunFolder(root / "run"), root, rows
        self.columns = {step: make_columns(step) for step in range(STEPS)}
        self.leave_out: set[tuple[str, int]] = set()
        self.chosen = {step: list(range(GROUPS * SIZE)) for step in range(STEPS)}
        self.scorer_versions = dict.fromkeys(range(STEPS), "1")

    async def write(self, *, finish: bool = True) -> RunFolder:
        config_of = StoreConfig(root=str(self._root))
        given = {"config": CONFIG, "fixed": {}, "versions": {}, "git_commit": "", "config_of": config_of}
        with OpenRun.open(self.folder, **given) as run:
            async with run.writer as writer:
                for step in range(STEPS):
                    self._run = run.manifest.run
                    # At once: each append waits for the shard that its rows are in.
                    appends = (
                        writer.append(dataset, rows, step=step, **partition)
                        for dataset, rows, partition in self._step(step)
                        if (dataset, step) not in self.leave_out
                    )
                    await asyncio.gather(*appends)
                    await writer.note()
                for version in (0, 2):
                    made = self._rows(
                        "evaluations",
                        2,
                        trajectory_id=[f"v{version}.a", f"v{version}.b"],
                        policy_version=version,
                    )
                    await writer.append("evaluations", made, version=version)
                if finish:
                    self._checkpoint()
                    run.finish()
        return self.folder

    def _checkpoint(self) -> None:
        """That of the last version, as a trainer writes it."""
        checkpoint = self.folder.checkpoint(STEPS)
        checkpoint.mkdir(parents=True)
        (checkpoint / FILE).write_bytes(b"weights and moments")
        marker = CheckpointMarker(
            format=2,
            run=self._run,
            version=STEPS,
            n_updates=STEPS,
            files={FILE: describe_file(checkpoint / FILE)},
        )
        (checkpoint / "COMPLETE.json").write_bytes(marker.to_bytes())

    def _step(self, step: int) -> Iterator[tuple[str, pa.RecordBatch, dict[str, str]]]:
        columns = self.columns[step]
        ids = columns["trajectory_id"]
        assert isinstance(ids, list)
        n, keys = len(ids), {name: columns[name] for name in ("step", "group", "sample", "trajectory_id")}
        plan = {"first_group": step * GROUPS, "n_groups": GROUPS, "reason": "plan"}
        yield "plans", self._rows("plans", step=step, **plan), {}
        yield "rollouts", self._rows("rollouts", n, **{"run": self._run} | columns), {}
        version = self.scorer_versions[step]
        scores = self._rows("scores", n, **keys, scorer="addition", version=version, status="scored")
        yield "scores", scores, {"scorer": f"addition@{version}"}
        groups = [step * GROUPS + group for group in range(GROUPS)]
        yield "groups", self._rows("groups", GROUPS, run=self._run, step=step, group=groups), {}
        chosen = [ids[place] for place in self.chosen[step]]
        batch = {"step": step, "order": list(range(len(chosen))), "trajectory_id": chosen, "source": ""}
        batch |= {"run": self._run, "source_step": step, "scorer": f"addition@{version}"}
        yield "batches", self._rows("batches", len(chosen), **batch), {}
        yield "metrics", self._rows("metrics", step=step, name="train/updated"), {}


@pytest.fixture
def story(tmp_path: Path, rows: RowMaker) -> Story:
    return Story(tmp_path, rows)


def findings(folder: RunFolder) -> list[str]:
    return [
        f"{each.where.removeprefix(folder.location)}: {each.what}" for each in verify_run(folder).findings
    ]


async def test_a_run_of_schema_version_2_has_no_findings(story: Story, version_2: Writing) -> None:
    with version_2():
        folder = await story.write()
    assert verify_run(folder).findings == []


async def test_a_run_of_the_writer_has_no_findings(story: Story) -> None:
    found = verify_run(await story.write())
    assert (found.findings, found.notes, found.steps) == ([], [], STEPS)


async def test_a_damaged_or_lost_shard_is_found_and_reading_it_names_it(story: Story, tmp_path: Path) -> None:
    intact = await story.write()
    keys = sorted(list_shard_sizes(open_files(intact)))

    @settings(max_examples=25)
    @given(st.sampled_from(keys), st.floats(0, 1, exclude_max=True), st.sampled_from(["flip", "cut", "lose"]))
    def check(key: str, place: float, how: str) -> None:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(intact.local, tmp_path / "copy")
        folder = RunFolder(tmp_path / "copy")
        path = folder.local / key
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        if how == "lose":
            path.unlink()
            assert findings(folder)
            return
        content[at] ^= 0xFF
        path.write_bytes(bytes(content) if how == "flip" else bytes(content[:at]))
        with pytest.raises(ShardError, match=path.name):
            read_shard(folder, key)
        assert str(path) in [each.where for each in verify_run(folder).findings]

    check()


@pytest.mark.parametrize(
    ("place", "target", "what"),
    [
        ("rollouts", "rollouts", "leads nowhere"),
        ("rollouts/step=000001", "step=000001", "leads nowhere"),
        ("rollouts/step=000001", "gone", "leads nowhere"),
        ("rollouts/step=000001/*.arrow", "itself", "leads nowhere"),
        ("rollouts/step=000007", ".", "leads to a folder that it is in"),
        ("groups/step=000001/more", "../..", "leads to a folder that it is in"),
    ],
)
async def test_a_link_that_leads_nowhere_or_into_a_loop_is_found(
    story: Story, place: str, target: str, what: str
) -> None:
    folder = await story.write()
    path = next(folder.local.glob(place), folder.local / place)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(path.name if target == "itself" else target)
    found = [each.what for each in verify_run(folder).findings if each.where == str(path)]
    assert [each for each in found if what in each] == [f"it is a link to {path.readlink()}, which {what}"]


async def test_a_data_set_or_a_partition_may_be_a_link_to_another_folder(
    story: Story, tmp_path: Path
) -> None:
    folder = await story.write()
    for number, place in enumerate(("rollouts", "groups/step=000001")):
        shutil.move(folder.local / place, tmp_path / str(number))
        (folder.local / place).symlink_to(tmp_path / str(number))
    assert findings(folder) == []


async def test_a_damaged_shard_leaves_one_note_and_hides_no_other_fault_of_its_step(
    story: Story, rows: RowMaker
) -> None:
    folder = await story.write()
    await append(folder, "groups", rows("groups", step=1, group=2, run=read_manifest(folder).run), step=1)
    (key,) = open_files(folder).keys("scores/*/step=000001/*.arrow")
    (folder.local / key).write_bytes(b"ARROW1")

    found = verify_run(folder)

    assert [each.where for each in found.findings] == [folder.path(key), folder.dataset("groups", step=1)]
    (note,) = found.notes
    assert note.startswith("step 1 could not be fully checked: ")


async def test_a_damaged_batch_does_not_hide_that_a_group_of_its_step_is_missing(story: Story) -> None:
    story.leave_out.add(("groups", 1))
    folder = await story.write()
    (key,) = open_files(folder).keys("batches/step=000001/*.arrow")
    (folder.local / key).write_bytes(b"ARROW1")
    assert "/groups/step=000001: 2 planned groups have no row: 2, 3" in findings(folder)


def no_logprob(columns: dict[str, Any]) -> None:
    columns["logprobs"] = [[np.nan, np.nan, np.nan, -1.0], *columns["logprobs"][1:]]


def a_logprob_too_many(columns: dict[str, Any]) -> None:
    columns["logprobs"] = [[np.nan, -1.0, -1.0, -1.0], *columns["logprobs"][1:]]


def a_short_mask(columns: dict[str, Any]) -> None:
    columns["loss_mask"] = [[False, True], *columns["loss_mask"][1:]]


def a_wrong_count(columns: dict[str, Any]) -> None:
    columns["n_completion_tokens"] = 3


def spans_in_disorder(columns: dict[str, Any]) -> None:
    columns["version_span_starts"] = [[3, 2]] * 4
    columns["version_span_versions"] = [[0, 1]] * 4


def a_span_outside(columns: dict[str, Any]) -> None:
    columns["version_span_starts"] = [[4]] * 4


def segments_of_a_later_parent(columns: dict[str, Any]) -> None:
    columns["segment_starts"], columns["segment_parents"] = (
        [[0], [0, 2], [0], [0]],
        [[-1], [-1, 1], [-1], [-1]],
    )
    columns["segment_prefix_tokens"] = columns["segment_prefix_messages"] = [[0], [0, 1], [0], [0]]


def a_segment_too_late(columns: dict[str, Any]) -> None:
    columns["segment_starts"] = [[0], [0], [0], [1]]


def a_segment_without_parent(columns: dict[str, Any]) -> None:
    columns["segment_starts"] = [[0, 3], *[[0]] * 3]


def turns_of_other_tokens(columns: dict[str, Any]) -> None:
    columns["turn_starts"] = columns["turn_messages"] = [[1]] * 4
    columns["turn_tokens"] = [[7]] * 4


def a_turn_without_message(columns: dict[str, Any]) -> None:
    columns["turn_starts"], columns["turn_tokens"] = [[1]] * 4, [[2]] * 4


def too_stale(columns: dict[str, Any]) -> None:
    columns["policy_version_first"] = 0


def twice(columns: dict[str, Any]) -> None:
    columns["trajectory_id"] = [*columns["trajectory_id"][:3], columns["trajectory_id"][0]]
    columns["sample"] = [0, 1, 0, 0]


def of_another_run(columns: dict[str, Any]) -> None:
    columns["run"] = "another"


def remove_from_plan(columns: dict[str, Any]) -> None:
    columns["group"] = [2, 2, 3, 99]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (no_logprob, "rollouts/step=000001: logprobs of sampled tokens are not finite: r.2.0"),
        (a_logprob_too_many, "logprobs of tokens that were not sampled are not NaN: r.2.0"),
        (a_short_mask, "token_ids, loss_mask and logprobs differ in length: r.2.0"),
        (segments_of_a_later_parent, "segments are not in order within the tokens of their parents: r.2.1"),
        (a_segment_too_late, "segments are not in order within the tokens of their parents: r.3.1"),
        (a_segment_without_parent, "segments are not in order within the tokens of their parents: r.2.0"),
        (turns_of_other_tokens, "turns do not have all sampled tokens: r.2.0, r.2.1, r.3.0, r.3.1"),
        (a_turn_without_message, "turns do not have all sampled tokens: r.2.0, r.2.1, r.3.0, r.3.1"),
        (
            a_wrong_count,
            "n_completion_tokens is not the number of True in loss_mask: r.2.0, r.2.1, r.3.0, r.3.1",
        ),
        (spans_in_disorder, "spans of policy versions are not in order within the tokens: r.2.0"),
        (a_span_outside, "spans of policy versions are not in order within the tokens: r.2.0"),
        (
            too_stale,
            "batches/step=000001: 4 trained rows are not 0 to 0 policy versions behind their step: r.2.0",
        ),
        (twice, "rollouts/step=000001: trajectory_id are there twice: r.2.0"),
        (twice, "rollouts/step=000001: group, sample, attempt are there twice: 3.0.0"),
        (twice, "rollouts/step=000001: 1 planned trajectories have no rollout: 3.1"),
        (of_another_run, "rollouts/step=000001: it has rows of run another, by run.json the step is of run "),
        (remove_from_plan, "rollouts/step=000001: 1 rollouts are in no plan: 99.1"),
    ],
)
async def test_rows_that_are_wrong_are_found(
    story: Story, change: Callable[..., None], expected: str
) -> None:
    change(story.columns[1])
    assert any(expected in each for each in findings(await story.write()))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("rollouts", "scores/scorer=addition@1/step=000000: 4 rows have no rollout: r.0.0, r.0.1"),
        ("rollouts", "batches/step=000000: 4 rows have no rollout"),
        ("rollouts", "rollouts/step=000000: 4 planned trajectories have no rollout: 0.0, 0.1, 1.0, 1.1"),
        ("scores", "scores/scorer=addition@1/step=000000: 4 rollouts have no score: r.0.0"),
        ("groups", "groups/step=000000: 2 planned groups have no row: 0, 1"),
        ("batches", "batches: no batch of steps 0"),
        ("metrics", "metrics: no metrics of steps 0"),
    ],
)
async def test_a_missing_data_set_of_a_step_is_found(story: Story, dataset: str, expected: str) -> None:
    story.leave_out.add((dataset, 0))
    assert any(expected in each for each in findings(await story.write()))


async def append(folder: RunFolder, dataset: str, made: pa.RecordBatch, **partition: int | str) -> None:
    with OpenRun.extend(folder, config_of=StoreConfig(root=str(folder.local.parent))) as run:
        async with run.writer as writer:
            await writer.append(dataset, made, **partition)


@pytest.mark.parametrize(
    ("dataset", "outer"),
    [
        ("routing", {}),
        ("states", {"env": "e"}),
        ("annotations", {}),
        ("logprobs", {"policy": "reference"}),
        ("logprobs", {"policy": "trainer"}),
    ],
)
async def test_rows_of_a_missing_rollout_are_found(
    story: Story, rows: RowMaker, dataset: str, outer: dict[str, str]
) -> None:
    folder = await story.write()
    if dataset == "states":
        keys = {"run": "r", "step": 1, "group": 9, "sample": 0, "trajectory_id": "gone"}
        made = state_row("e", {"n": "int64"}, **keys, values={"n": 1})
    else:
        made = rows(dataset, step=1, trajectory_id="gone")
    await append(folder, dataset, made, **outer, step=1)
    (found,) = findings(folder)
    assert found.startswith(f"/{dataset}")
    assert found.endswith(": 1 rows have no rollout: gone")


@pytest.mark.parametrize(
    ("logprobs", "n", "expected"),
    [
        ([np.nan, np.nan, -1.0, -2.0], 2, "trajectories are there twice: r.0.0"),
        ([np.nan, -1.0, -2.0], 1, "values by token are not as many as token_ids: r.0.0"),
        ([np.nan, np.nan, -1.0, np.nan], 1, "logprobs of sampled tokens are not finite: r.0.0"),
        ([0.0, np.nan, -1.0, -2.0], 1, "logprobs of tokens that were not sampled are not NaN: r.0.0"),
    ],
)
async def test_log_probabilities_that_are_not_those_of_a_rollouts_tokens_are_found(
    story: Story, rows: RowMaker, logprobs: list[float], n: int, expected: str
) -> None:
    folder = await story.write()
    made = rows("logprobs", n, step=0, trajectory_id="r.0.0", logprobs=[logprobs] * n)
    await append(folder, "logprobs", made, policy="reference", step=0)
    assert findings(folder) == [f"/logprobs/policy=reference/step=000000: {expected}"]


async def test_rows_of_two_models_under_one_teachers_name_are_found_and_those_of_two_teachers_are_right(
    story: Story, rows: RowMaker
) -> None:
    folder, values = await story.write(), [[np.nan, np.nan, -1.0, -2.0]]
    for name, model, step in (("big", "a@1", 0), ("big", "b@1", 1), ("small", "c@2", 0)):
        made = rows("logprobs", step=step, trajectory_id=f"r.{step * GROUPS}.0", model=model, logprobs=values)
        await append(folder, "logprobs", made, policy=name, step=step)
    assert findings(folder) == []
    made = rows("logprobs", step=0, trajectory_id="r.1.0", model="c@3", logprobs=values)
    await append(folder, "logprobs", made, policy="small", step=0)
    assert findings(folder) == ["/logprobs/policy=small: it has rows of different models: c@2, c@3"]


@pytest.mark.parametrize(("source", "source_step"), [("other", 0), ("", 0)])
async def test_a_batch_row_that_its_source_lacks_is_found(
    story: Story, rows: RowMaker, tmp_path: Path, source: str, source_step: int
) -> None:
    folder = await story.write()
    origin = str(tmp_path / source) if source else ""
    if source:
        shutil.copytree(folder.local, origin)
    lost = {"run": read_manifest(folder).run, "trajectory_id": "gone", "source": origin}
    made = rows("batches", step=1, order=4, group=3, source_step=source_step, **lost)
    await append(folder, "batches", made, step=1)
    missing = f"/batches/step=000001: 1 rows have no rollout in {origin or folder.location}, step {source_step}: gone"
    assert findings(folder) == [
        f"/batches/step=000001: group 3 of its rows was sampled at step {source_step} of {origin or 'this run'}, and the step's plan "
        "does not say so",
        missing,
    ]
    stored = StoredGroup(origin, source_step, 1)
    plan = make_plan_rows(str(lost["run"]), 1, [GroupRange(3, 1, "replay", stored=stored)])
    await append(folder, "plans", plan, step=1)
    unplanned = "/rollouts/step=000001: 2 rollouts are in no plan: 3.0, 3.1"
    assert findings(folder) == [unplanned, missing]


@pytest.mark.parametrize(
    ("dataset", "columns", "expected"),
    [
        ("groups", {"group": 2}, "/groups/step=000001: group, subgroup are there twice: 2.1"),
        (
            "plans",
            {"first_group": 3, "n_groups": 1, "problems": [[]]},
            "/plans/step=000001: groups are planned twice: 3",
        ),
        (
            "plans",
            {"first_group": 40, "n_groups": 1, "reason": "refill", "problems": [[5, 6]]},
            "/plans/step=000001: the plan of the 1 groups from 40 names 2 problems",
        ),
        (
            "batches",
            {"order": 4, "trajectory_id": "r.2.0", "source": "", "source_step": 1},
            "/batches/step=000001: trajectories are trained on twice: r.2.0",
        ),
    ],
)
async def test_duplicate_rows_are_found(
    story: Story, rows: RowMaker, dataset: str, columns: dict[str, object], expected: str
) -> None:
    folder = await story.write()
    run = read_manifest(folder).run
    await append(folder, dataset, rows(dataset, step=1, run=run, **columns), step=1)
    assert expected in findings(folder)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"run": "another"}, "by run.json the step is of run another"),
        ({"epoch": 0}, "/run.json: it says epoch 0, and there are shards of epoch 1"),
        (
            {"config": CONFIG | {"steps": 3}},
            "/run.json: it says that the run is finished with 3 steps, 2 have a batch",
        ),
    ],
)
async def test_a_run_json_of_other_data_is_found(
    story: Story, changed: dict[str, Any], expected: str
) -> None:
    folder = await story.write()
    stored = read_manifest(folder)
    write_manifest(open_files(folder), replace(stored, **changed), stored)
    assert any(expected in each for each in findings(folder))


async def test_a_gap_in_the_middle_of_the_steps_is_found(story: Story, rows: RowMaker) -> None:
    folder = await story.write()
    batch = rows("batches", 0, step=3)
    await append(folder, "batches", batch, step=3)
    await append(folder, "metrics", rows("metrics", step=3, name="train/updated"), step=3)
    assert findings(folder)[0] == "/batches: no batch of steps 2"


async def test_a_file_that_is_no_shard_and_a_shard_that_nobody_wrote_are_found(story: Story) -> None:
    folder = await story.write()
    key = open_files(folder).keys("groups/step=000000/*.arrow")[0]
    (folder.local / key).with_name("mine.arrow").write_bytes(b"ARROW1")
    shutil.copy(folder.local / key, (folder.local / key).with_name(f"000001-000900-{key[-22:-6]}.arrow"))
    found = findings(folder)
    assert any("mine.arrow: it is not named as a shard is" in each for each in found)
    assert any("000001-000900" in each and "the inventory does not know it" in each for each in found)


async def test_a_partial_evaluation_and_a_checkpoint_of_another_batch_are_found(
    story: Story,
) -> None:
    folder = await story.write()
    (evaluation,) = open_files(folder).keys("evaluations/version=000002/*.arrow")
    (folder.local / evaluation).unlink()
    publish_text(open_files(folder), "checkpoints/version=000002/COMPLETE.json", b'{"digest": "ab"}')
    found = findings(folder)
    assert any("evaluations/version=000002: 0 of 2 held-out trajectories are there" in each for each in found)
    assert any("COMPLETE.json: it applied batch ab..., stored for step 1 is" in each for each in found)


async def test_an_evaluation_of_more_prompts_than_run_json_names_is_found(
    story: Story, rows: RowMaker
) -> None:
    folder = await story.write()
    more = rows("evaluations", 2, policy_version=2, trajectory_id=["v2.more", "v2.most"])
    await append(folder, "evaluations", more, version=2)
    assert findings(folder)[0] == "/evaluations/version=000002: 4 of 2 held-out trajectories are there"


async def test_a_score_of_a_held_out_trajectory_that_is_not_there_is_found(
    story: Story, rows: RowMaker
) -> None:
    folder = await story.write()
    with OpenRun.extend(folder, config_of=StoreConfig(root=str(folder.local.parent))) as run:
        async with run.writer as writer:
            made = rows("evaluation_scores", 2, step=2, trajectory_id=["v2.a", "gone"])
            await writer.append("evaluation_scores", made, scorer="addition@1", step=2)
    assert findings(folder) == [
        "/evaluation_scores: 1 rows of version 2 have no held-out trajectory: gone",
    ]


async def test_a_version_that_was_not_due_when_it_was_trained_is_no_finding(story: Story) -> None:
    folder = await story.write()
    manifest = read_manifest(folder)
    config = manifest.config | {"evaluate": {"every": 1, "n_prompts": 1}}
    write_manifest(open_files(folder), replace(manifest, config=config), manifest)

    assert findings(folder) == []


async def test_steps_of_a_forks_source_are_verified_with_the_sources_settings_and_scorer(
    story: Story, tmp_path: Path, rows: RowMaker
) -> None:
    story.columns[1] |= {"policy_version_first": 0}
    source, target, again = await story.write(), RunFolder(tmp_path / "fork"), RunFolder(tmp_path / "again")
    manifest = read_manifest(source)
    loose = manifest.config | {"rollout": {"group_size": SIZE, "max_staleness": 1}}
    write_manifest(open_files(source), replace(manifest, config=loose), manifest)
    config_of = StoreConfig(root=str(tmp_path))
    config = loose | {"steps": STEPS + 1, "rollout": {"group_size": 1, "max_staleness": 0}}
    fork_run(source, STEPS, target, config, config_of, {})
    own = make_columns(STEPS) | {"trajectory_id": [f"f.{each}" for each in range(4)]}
    own |= {"group": [4, 5, 6, 7], "sample": 0, "run": read_manifest(target).run}
    with OpenRun.extend(target, config_of=config_of) as run:
        async with run.writer as writer:
            plan = {"first_group": 4, "n_groups": 4, "reason": "plan"}
            writer.append("plans", rows("plans", step=STEPS, **plan), step=STEPS)
            writer.append("rollouts", rows("rollouts", 4, **own), step=STEPS)
            scores = rows("scores", 4, step=STEPS, trajectory_id=own["trajectory_id"], status="scored")
            writer.append("scores", scores, scorer="other@1", step=STEPS)
            writer.append(
                "groups", rows("groups", 4, step=STEPS, run=own["run"], group=own["group"]), step=STEPS
            )
            batch = {"order": [0, 1, 2, 3], "trajectory_id": own["trajectory_id"], "source": ""}
            batch |= {"run": own["run"], "step": STEPS, "source_step": STEPS, "scorer": "other@1"}
            writer.append("batches", rows("batches", 4, **batch), step=STEPS)
            writer.append("metrics", rows("metrics", step=STEPS), step=STEPS)
    fork_run(target, STEPS, again, config | {"rollout": {"group_size": 3, "max_staleness": 0}}, config_of, {})

    assert findings(target) == []
    assert findings(again) == []


async def test_a_lost_inventory_is_found(story: Story) -> None:
    folder = await story.write()
    for key in open_files(folder).keys("shards/*/*.arrow"):
        (folder.local / key).unlink()
    assert any("there is no inventory" in each for each in findings(folder))


@pytest.mark.slow
async def test_the_command_prints_findings_and_has_an_exit_status(story: Story) -> None:
    folder = await story.write()

    def verify(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollmill.flows.cli", "verify", folder.location, *words]
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )

    whole = verify()
    assert (whole.returncode, whole.stderr.strip()) == (0, "")
    assert "2 steps verified, nothing is wrong" in whole.stdout
    open_files(folder).remove(open_files(folder).keys("scores/*/step=000001/*.arrow"))
    lost = verify("--json")
    assert lost.returncode == 1
    said = json.loads(lost.stdout)
    assert not said["ok"]
    assert [sorted(each) for each in said["findings"]] == [["remedy", "what", "where"]] * 2
    assert said["findings"][0]["what"] == "it is missing: it was written with 4 rows"
    assert "4 rollouts have no score" in verify().stdout


async def test_a_running_run_is_verified_up_to_its_last_step(story: Story) -> None:
    story.leave_out |= {(dataset, 1) for dataset in ("groups", "batches", "metrics", "scores")}
    found = verify_run(await story.write(finish=False))
    assert found.findings == []
    assert found.notes == ["step 1 is not done: it has no batch yet"]


async def test_a_finished_run_whose_writer_still_stores_spans_has_no_findings(
    story: Story, rows: RowMaker, tmp_path: Path
) -> None:
    folder = await story.write()
    with OpenRun.extend(folder, config_of=StoreConfig(root=str(tmp_path))) as run:
        async with run.writer as writer:
            await writer.append("spans", rows("spans", step=1), step=1)
            assert verify_run(folder).findings == []
    assert verify_run(folder).findings == []


async def test_a_run_that_continues_while_it_is_verified_has_no_findings(
    story: Story, tmp_path: Path
) -> None:
    folder = await story.write(finish=False)
    later = [key for key in open_files(folder).keys("*/**/*.arrow") if not key.startswith("plans/")]
    for number, key in enumerate(later):
        (folder.local / key).rename(tmp_path / str(number))

    def store_meanwhile(done: int, total: int) -> None:
        for number, key in enumerate(later if done == 1 else []):
            (tmp_path / str(number)).rename(folder.local / key)

    assert verify_run(folder, store_meanwhile).findings == []


async def test_rows_that_are_stored_while_a_step_is_verified_are_no_finding(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = STEPS - 1
    story.leave_out = {(name, last) for name in ("groups", "batches", "metrics")}
    folder = await story.write(finish=False)
    held = open_files(folder).keys(f"rollouts/step={last:06d}/*") + open_files(folder).keys(
        f"scores/*/step={last:06d}/*"
    )
    for number, key in enumerate(held):
        (folder.local / key).rename(tmp_path / str(number))

    def read_then_store(where: RunFolder, dataset: str, *columns: Any, **partition: Any) -> pa.Table:
        found = read(where, dataset, *columns, **partition)
        if dataset in ("rollouts", "scores") and partition.get("step") == last:
            for number, key in enumerate(held):
                (tmp_path / str(number)).rename(folder.local / key)
            held.clear()
        return found

    monkeypatch.setattr(run_views, "read", read_then_store)
    found = [each for each in findings(folder) if "no rollout" in each]
    assert (found, held) == ([], [])


async def test_a_later_version_of_the_scorer_scores_later_steps(story: Story) -> None:
    story.scorer_versions[STEPS - 1] = "2"
    assert findings(await story.write()) == []


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("rollouts/SHARD", "it is not in a partition, rollouts/step=..."),
        ("rollouts/step=000000/copy/SHARD", "it is not in a partition, rollouts/step=..."),
        ("rollouts/step=0/SHARD", "it is not in a partition, rollouts/step=..."),
        ("rollouts/x.arrow", "it is not named as a shard is"),
        ("rollouts/a/b/c/x.arrow", "it is not named as a shard is"),
        ("rollouts/step=000000/junk.txt", "it is not named as a shard is"),
        ("scores/notes", "it is not named as a shard is"),
    ],
)
async def test_a_foreign_file_is_found_anywhere_in_a_data_set(story: Story, key: str, what: str) -> None:
    folder = await story.write()
    (shard,) = open_files(folder).keys("rollouts/step=000000/*.arrow")
    key = key.replace("SHARD", shard.rpartition("/")[2])
    (folder.local / key).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder.local / shard, folder.local / key)
    assert f"/{key}: {what}" in findings(folder)


@pytest.mark.parametrize("marker", [b"[]", b"null", b"{", b"\xff"])
async def test_a_marker_that_is_no_object_is_found(story: Story, marker: bytes) -> None:
    folder = await story.write()
    publish_text(open_files(folder), "checkpoints/version=000002/COMPLETE.json", marker)
    assert any("version=000002/COMPLETE.json: it is damaged" in each for each in findings(folder))


@pytest.mark.parametrize("section", ["rollout", "score", "store", "evaluate", "steps"])
@pytest.mark.parametrize("value", ["text", [1]])
async def test_an_invalid_setting_of_run_json_is_found(story: Story, section: str, value: object) -> None:
    folder = await story.write()
    manifest = json.loads((folder.local / "run.json").read_text())
    manifest["config"][section] = value
    (folder.local / "run.json").write_text(json.dumps(manifest))
    (found,) = findings(folder)
    assert found.startswith(f"/run.json: damaged: config.{section}: Input should be")


@pytest.mark.slow
async def test_a_damaged_run_json_is_found_and_a_missing_run_cannot_be_checked(
    story: Story,
) -> None:
    folder = await story.write()

    def status(location: str) -> int:
        command = [sys.executable, "-m", "rollmill.flows.cli", "verify", location]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert "Traceback" not in ended.stderr
        return ended.returncode

    (folder.local / "run.json").write_text("{")
    assert status(folder.location) == 1
    assert status(f"{folder.location}/nothing") == 2


@pytest.mark.slow
def test_a_missing_bucket_cannot_be_checked(s3_root: str) -> None:
    command = [sys.executable, "-m", "rollmill.flows.cli", "verify", "s3://no-such-bucket-of-ours/run"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("rollmill: cannot list s3://no-such-bucket-of-ours/run")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "it is missing: it was written with 19 bytes"),
        (b"weights", "it has 7 bytes, and was written with 19"),
        (b"weights and_moments", "its bytes are not those that were written"),
    ],
)
async def test_a_changed_file_of_a_checkpoint_is_found(
    story: Story, content: bytes | None, what: str
) -> None:
    folder = await story.write()
    path = folder.checkpoint(STEPS) / FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert findings(folder) == [f"/checkpoints/version=000002/{FILE}: {what}"]


async def test_a_checkpoint_that_the_run_removes_meanwhile_is_no_finding(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await story.write()

    def remove(*_: object) -> Iterator[tuple[str, str]]:
        shutil.rmtree(folder.checkpoint(STEPS))
        yield f"checkpoints/version=000002/{FILE}", "it is missing"

    monkeypatch.setattr("rollmill.tasks.store.verify.run_verification.find_wrong_files", remove)
    assert findings(folder) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (b'"n_updates": 2', b'"n_updates": 3', "it is damaged: its content is not what was written"),
        (b'"files"', b'"filet"', "it is damaged: its content is not what was written"),
        (None, b"[" * 100_000, "it is damaged: it is no JSON"),
        (None, b'{"a": 1}', "its run is '', expected"),
        (None, b'{"format": 2, "run": "r", "version": 2, "n_updates": 2}', "it is damaged: files is missing"),
    ],
)
async def test_a_marker_that_was_changed_is_found(
    story: Story, old: bytes | None, new: bytes, what: str
) -> None:
    folder = await story.write()
    path = folder.checkpoint(STEPS) / "COMPLETE.json"
    written = path.read_bytes()
    assert old is None or old in written
    path.write_bytes(written.replace(old, new) if old else new)
    assert any(f"version=000002/COMPLETE.json: {what}" in each for each in findings(folder))


@pytest.mark.parametrize("content", [None, b"weights"])
async def test_a_checkpoint_without_a_whole_file_is_refused_before_it_is_loaded(
    story: Story, content: bytes | None
) -> None:
    folder = await story.write()
    checkpoint = folder.checkpoint(STEPS)
    marker = parse_marker((checkpoint / "COMPLETE.json").read_bytes(), "it")
    assert marker.files
    check_files(checkpoint, marker.files, reads_bytes=False)
    (checkpoint / FILE).unlink()
    if content is not None:
        (checkpoint / FILE).write_bytes(content)
    with pytest.raises(StoreError, match=FILE):
        check_files(checkpoint, marker.files, reads_bytes=False)


async def test_a_finished_run_without_its_last_checkpoint_is_found(story: Story) -> None:
    folder = await story.write()
    shutil.rmtree(folder.local / "checkpoints")
    (found,) = findings(folder)
    assert "its last checkpoint, of version 2, is missing" in found


@pytest.mark.parametrize("n_left", [0, 1])
async def test_a_missing_inventory_of_an_unfinished_run_is_found_from_the_next_batch(
    story: Story, n_left: int
) -> None:
    folder = await story.write(finish=False)
    for key in open_files(folder).keys("shards/*/*.arrow")[n_left:]:
        (folder.local / key).unlink()
    what = "there is no inventory, so that shards that are missing are seen by their rows alone"
    assert findings(folder) == ([] if n_left else [f"/shards: {what}"])


async def test_good_shards_of_a_lost_shard_of_the_inventory_are_kept(story: Story) -> None:
    folder = await story.write()
    newest = open_files(folder).keys("shards/*/*.arrow")[-1]
    (folder.local / newest).unlink()
    found = verify_run(folder).findings
    assert found
    assert all(each.what == "the inventory does not know it" for each in found)
    assert all(each.remedy.startswith("keep it: the shard of the inventory") for each in found)
    assert all("shards/epoch=000001/000001-NUMBER-DIGEST.arrow" in each.remedy for each in found)
