"""From an exported policy to every trajectory that made it; a changed byte on the way is found and named."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from huggingface_hub import ModelCard

from rollmill.flows import cli
from rollmill.tasks.look.tables.lineage_table import make_lineage_view
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.lineage.lineage_trace import LineageReport, trace_policy
from rollmill.tasks.store.lineage.lineage_writer import write_lineage
from rollmill.tasks.store.lineage.policy_lineage import read_lineage
from rollmill.tasks.store.logprob_rows import make_logprob_rows
from rollmill.tasks.store.reader import read, read_trajectories
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.run.manifest import TrainingSource, read_manifest, write_manifest
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName

Command = Callable[..., str]
VERSION = 3


def export(run: RunFolder, model: Path, version: int = VERSION) -> RunFolder:
    """Export a policy as the trainer does, with a file of bytes as its weights."""
    policy = run.policy(version)
    (policy / "adapter").mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(random.Random(version).randbytes(3000))
    (policy / "adapter" / "adapter_config.json").write_text("{}")
    write_lineage(policy, run, version, model)
    return RunFolder(policy)


@pytest.fixture
def run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the small run."""
    folder = RunFolder(tmp_path / "runs" / "copy")
    shutil.copytree(small_run.local, folder.local)
    return folder


@pytest.fixture
def model(small_run: RunFolder) -> Path:
    return small_run.local.parent.parent / "model"


@pytest.fixture
def policy(run: RunFolder, model: Path) -> RunFolder:
    return export(run, model)


def places(report: LineageReport) -> list[str]:
    return [each.where for each in report.findings]


def test_a_folder_leads_to_the_row_of_every_trajectory_that_was_trained_on(
    run: RunFolder, policy: RunFolder, rollmill: Command
) -> None:
    found = json.loads(rollmill("lineage", policy.location, "--json"))
    assert found["ok"]
    batches = pl.DataFrame(read(run, "batches")).sort("step", "order")
    keys = ["run", "step", "group", "sample", "trajectory_id"]
    assert [[row[key] for key in keys] for row in found["rows"]] == [
        list(row) for row in batches.select(keys).rows()
    ]
    assert len({row["digest"] for row in found["rows"]}) == len(batches) > 10
    assert {row["scorer"] for row in found["rows"]} == {"addition@1"}
    (traced,) = found["policies"]
    assert (traced["version"], traced["folder"]) == (VERSION, run.absolute)


def test_the_table_fits_80_columns(
    policy: RunFolder, rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = rollmill("lineage", policy.location, "--limit", "3").splitlines()
    (header,) = [place for place, line in enumerate(lines) if line.startswith("run ")]
    assert {"step", "group", "sample", "digest"} <= set(lines[header].split())
    assert len(lines[header + 2 : header + 5][-1].split()) == len(lines[header].split())
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(
    "pattern",
    [
        "policies/*/model.safetensors",
        "policies/*/adapter/adapter_config.json",
        "policies/*/lineage.json",
        "batches/step=000001/*.arrow",
        "rollouts/step=000002/*.arrow",
        "scores/scorer=addition@1/step=000001/*.arrow",
    ],
)
def test_one_changed_byte_anywhere_is_found_and_named(
    run: RunFolder, policy: RunFolder, pattern: str
) -> None:
    draw = random.Random(pattern)
    (*_, path) = sorted(run.local.glob(pattern))
    before = path.read_bytes()
    for place in {0, len(before) - 1, *(draw.randrange(len(before)) for _ in range(4))}:
        changed = bytearray(before)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert places(trace_policy(policy)) == [str(path)], f"byte {place}"


def test_a_trajectory_that_several_steps_trained_on_is_counted_once(policy: RunFolder) -> None:
    report = trace_policy(policy)
    once, twice = (
        make_lineage_view("p", each).title
        for each in (report, replace(report, rows=[*report.rows, *report.rows]))
    )
    n = len(report.rows)
    assert once.startswith(f"p: {n} trajectories, sampled in")
    assert twice.startswith(f"p: {n} trajectories, trained on {2 * n} times in all, sampled in")


def test_the_command_names_what_differs_and_ends_with_status_1(
    policy: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (policy.local / "config.json").write_text("[]")
    # The paths of tests may be longer than a terminal is wide.
    monkeypatch.setenv("COLUMNS", "400")
    for words in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["rollmill", "lineage", policy.location, *words])
        with pytest.raises(SystemExit) as end:
            cli.run_command()
        said = capsys.readouterr().out
        assert end.value.code == 1
        assert "config.json" in said
        assert "its bytes are not those that were written" in said


def test_missing_and_added_files_are_found(run: RunFolder, policy: RunFolder) -> None:
    (policy.local / "pytorch_model.bin").touch()
    (policy.local / "config.json").unlink()
    shutil.rmtree(run.local / "rollouts" / "step=000001")
    found = places(trace_policy(policy))
    assert found[:2] == [policy.path("config.json"), policy.path("pytorch_model.bin")]
    assert found[2:] == [run.dataset("batches", step=1)]


@pytest.mark.parametrize(
    ("dataset", "column", "value"), [("scores", "reward", 0.25), ("rollouts", "sampling_seed", 5)]
)
def test_rows_that_were_replaced_by_whole_shards_are_found(
    run: RunFolder, policy: RunFolder, dataset: str, column: str, value: float
) -> None:
    """The shard's own hashes are right: only the digest at the export differs."""
    partition = {"scorer": "addition@1", "step": 1} if dataset == "scores" else {"step": 1}
    table = read(run, dataset, **partition)
    at = table.schema.get_field_index(column)
    other = table.set_column(
        at, table.schema.field(at), pa.array([value] * len(table), table.schema.field(at).type)
    )
    folder = Path(run.dataset(dataset, **partition))
    shutil.rmtree(folder)
    write = partial(write_shard, name=ShardName(1, 900), dataset=dataset, appended=[rows_from_table(other)])
    open_files(run).publish(str(folder.relative_to(run.local)), write)

    (finding,) = trace_policy(policy).findings
    assert finding.where == run.dataset("batches", step=1)
    assert "not those that the policy was trained on" in finding.what


def retrain(run: RunFolder, source: RunFolder) -> None:
    """Make the batches of a run those of a source, as the flow retrain stores them."""
    for step in range(VERSION):
        table = read(run, "batches", step=step)
        columns = {"source": [source.absolute] * len(table), "run": ["other"] * len(table)}
        for name, values in columns.items():
            table = table.set_column(
                table.schema.get_field_index(name), table.schema.field(name), pa.array(values)
            )
        folder = Path(run.dataset("batches", step=step))
        shutil.rmtree(folder)
        write = partial(
            write_shard, name=ShardName(1, 900), dataset="batches", appended=[rows_from_table(table)]
        )
        open_files(run).publish(str(folder.relative_to(run.local)), write)
    for dataset in ("rollouts", "scores"):
        shutil.rmtree(run.local / dataset)


def test_retrained_and_continued_policies_lead_to_the_rows_of_their_sources(
    run: RunFolder, small_run: RunFolder, policy: RunFolder, tmp_path: Path
) -> None:
    other = RunFolder(tmp_path / "runs" / "retrained")
    shutil.copytree(small_run.local, other.local)
    retrain(other, run)
    manifest = read_manifest(other)
    sources = (TrainingSource(manifest.run, run.absolute),)
    write_manifest(open_files(other), replace(manifest, run="other", sources=sources), manifest)
    second = export(other, policy.local)
    lineage = read_lineage(second)
    assert [each.folder for each in lineage.sources] == [run.absolute]

    report = trace_policy(second)
    assert report.findings == []
    assert [each.location for each in report.policies] == [second.location, policy.absolute]
    n_trained = read(run, "batches").num_rows
    assert [row.location for row in report.rows[:n_trained]] == [run.absolute] * n_trained
    assert len(report.rows) == 2 * n_trained

    weights = policy.local / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    path, *_ = sorted((run.local / "rollouts" / "step=000001").glob("*.arrow"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert sorted(places(trace_policy(second))) == sorted([str(weights), str(path)])


def annotate(source: RunFolder, teacher: str, model: str) -> None:
    """Store log-probabilities by a teacher of the trajectories of a run's batches, as the flow annotate does."""
    for step in range(VERSION):
        ids = read(source, "batches", step=step)["trajectory_id"].to_pylist()
        lengths = read_trajectories(source, step, ids, ["token_ids"])["token_ids"].to_pylist()
        logprobs = [np.full(len(tokens), -1.5, np.float32) for tokens in lengths]
        rows = make_logprob_rows(read_manifest(source).run, step, [model] * len(ids), ids, logprobs)
        write = partial(write_shard, name=ShardName(1, 950), dataset="logprobs", appended=[rows])
        open_files(source).publish(partition_folder("logprobs", {"policy": teacher, "step": step}), write)


@pytest.fixture
def distilled(run: RunFolder, small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """A run that trains on rollouts of `run` and on their log-probabilities by the teacher `old` alone."""
    folder = RunFolder(tmp_path / "runs" / "distilled")
    shutil.copytree(small_run.local, folder.local)
    retrain(folder, run)
    annotate(run, "old", "pol-a@0f3c")
    manifest = read_manifest(folder)
    kl = {**manifest.config["train"]["kl"], "reference": "stored", "teacher": "old"}
    changed = replace(
        manifest,
        run="distilled",
        sources=(TrainingSource(manifest.run, run.absolute),),
        config=manifest.config | {"train": manifest.config["train"] | {"kl": kl}},
    )
    write_manifest(open_files(folder), changed, manifest)
    return folder


def test_a_distilled_policy_leads_to_its_teacher_and_to_the_log_probabilities_that_it_was_trained_on(
    run: RunFolder, distilled: RunFolder, model: Path, rollmill: Command
) -> None:
    policy = export(distilled, model)
    taught = [each.teacher for each in read_lineage(policy).steps]
    assert [(each.name, each.models) for each in taught if each] == [("old", ("pol-a@0f3c",))] * VERSION
    assert "| teacher | `old (pol-a@0f3c)` |" in (policy.local / "README.md").read_text()
    assert trace_policy(policy).findings == []
    assert "taught by old (pol-a@0f3c)" in rollmill("lineage", policy.location)

    (path,) = run.local.glob("logprobs/policy=old/step=000001/*.arrow")
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert places(trace_policy(policy)) == [str(path)]

    # A whole shard with other values, and none.
    shutil.rmtree(path.parent)
    assert places(trace_policy(policy)) == [distilled.dataset("batches", step=1)]
    annotate(run, "old", "pol-b@77aa")
    assert places(trace_policy(policy)) == [
        distilled.dataset("batches", step=step) for step in range(VERSION)
    ]


def test_a_lineage_without_teachers_of_an_older_rollmill_is_read_and_their_shards_are_checked(
    run: RunFolder, distilled: RunFolder, model: Path
) -> None:
    policy = export(distilled, model)
    known = read_lineage(policy)
    older = known.model_copy(
        update={"steps": tuple(each.model_copy(update={"teacher": None}) for each in known.steps)}
    )
    assert all("teacher" not in step for step in json.loads(older.to_bytes())["steps"])
    (policy.local / "lineage.json").write_bytes(older.to_bytes())
    assert trace_policy(policy).findings == []
    (path,) = run.local.glob("logprobs/policy=old/step=000000/*.arrow")
    path.write_bytes(path.read_bytes()[:-1])
    assert places(trace_policy(policy)) == [str(path)]
    # The next policy of the run has them.
    path.unlink()
    shutil.rmtree(run.local / "logprobs")
    annotate(run, "old", "pol-a@0f3c")
    shutil.copytree(policy.local, distilled.policy(2))
    shutil.rmtree(policy.local)
    assert all(each.teacher for each in read_lineage(export(distilled, model)).steps)


def test_a_run_that_was_moved_with_its_policies_is_found_and_one_that_is_gone_is_named(
    run: RunFolder, policy: RunFolder
) -> None:
    moved = run.local.with_name("moved")
    run.local.rename(moved)
    inside = RunFolder(moved / "policies" / "version=000003")
    assert trace_policy(inside).findings == []
    alone = RunFolder(moved.with_name("policy"))
    shutil.copytree(inside.local, alone.local)
    (finding,) = trace_policy(alone).findings
    assert finding.where == run.absolute
    assert "found no run" in finding.what


def test_what_an_earlier_policy_of_the_run_records_is_not_read_again(run: RunFolder, model: Path) -> None:
    first = read_lineage(export(run, model, 2))
    shutil.rmtree(run.local / "rollouts" / "step=000000")
    second = read_lineage(export(run, model, 3))
    assert second.steps[:2] == first.steps
    assert [each.error for each in second.steps] == ["", "", ""]


def test_rows_that_cannot_be_read_do_not_stop_an_export_and_are_named_by_it(
    run: RunFolder, model: Path
) -> None:
    shutil.rmtree(run.local / "scores")
    policy = export(run, model)
    assert all("lacks the scores" in each.error for each in read_lineage(policy).steps)
    assert places(trace_policy(policy)) == [run.dataset("batches", step=step) for step in range(VERSION)]


def test_the_model_card_is_one_of_hugging_faces(run: RunFolder, model: Path) -> None:
    manifest = read_manifest(run)
    prompts = {"path": "openai/gsm8k", "license": "MIT"}
    settings = manifest.config | {"model": "Qwen/Qwen3-0.6B"}
    settings["rollout"] = settings["rollout"] | {"environment": "prompts", "prompts": prompts}
    write_manifest(open_files(run), replace(manifest, config=settings), manifest)
    policy = export(run, model)

    card = ModelCard.load(policy.local / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.library_name == "transformers"
    assert "licence MIT" in card.text
    assert "`addition@1`" in card.text
    (policy.local / "README.md").write_text("edited")
    assert trace_policy(policy).findings == []


@pytest.mark.slow
def test_a_policy_on_s3_is_followed_and_checked_there(
    small_run_on_s3: RunFolder, model: Path, tmp_path: Path
) -> None:
    from rollmill.tasks.store.s3.s3_files import open_objects

    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(3000))
    write_lineage(folder, small_run_on_s3, VERSION, model)
    policy = RunFolder(small_run_on_s3.path("policies/version=000003"))
    objects = open_objects(policy)
    for path in folder.iterdir():
        objects.upload(path, path.name)
    report = trace_policy(policy)
    assert report.findings == []
    assert len(report.rows) == read(small_run_on_s3, "batches").num_rows

    (folder / "model.safetensors").write_bytes(bytes(2999) + b"\x01")
    objects.upload(folder / "model.safetensors", "model.safetensors")
    key = open_files(small_run_on_s3).keys("rollouts/step=000001/*.arrow")[0]
    run_objects = open_objects(small_run_on_s3)
    content = bytearray(run_objects.get(key).content)
    content[len(content) // 2] ^= 1
    (tmp_path / "shard").write_bytes(content)
    run_objects.upload(tmp_path / "shard", key)
    assert places(trace_policy(policy)) == [policy.path("model.safetensors"), small_run_on_s3.path(key)]
