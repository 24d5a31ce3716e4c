"""Whether a run's folder can be resumed."""

from pathlib import Path

import pytest

from rollmill.flows.configuration.settings import describe, load, settings
from rollmill.flows.run.folder import check_movable, check_resumable, is_finished, move_aside, run_folder
from rollmill.tasks.errors import ConfigError, RunFinishedError, RunLockedError, RunMismatchError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import lock_run
from rollmill.tasks.store.run.manifest import Manifest, write_manifest
from rollmill.tasks.store.schemas import SCHEMA_VERSION
from tests.stubs.toy_settings import validate_toy


def create_run(root: Path, status: str, *changes: str, trains: bool = True) -> Path:
    """A folder that holds a run of the quickstart, called `quickstart`."""
    settings_of_it = load("quickstart", (f"store.root={root}", *changes))
    folder = run_folder("quickstart", settings_of_it)
    folder.local.mkdir()
    folder.tmp.mkdir()
    write_manifest(
        open_files(folder),
        Manifest(
            run="ab",
            incarnation=1,
            epoch=1,
            schema_version=SCHEMA_VERSION,
            config=settings_of_it.model_dump(mode="json"),
            versions={},
            git_commit="",
            created_at="2026-01-01T00:00:00+00:00",
            status=status,
            trains=trains,
        ),
        None,
    )
    return folder.local


@pytest.mark.parametrize(
    "change",
    [
        *("train.lr=1e-6", "train.ranks=2", "train.zero_stage=3", "steps=50"),
        *("rollout.trajectory_timeout_s=9", "max_restarts=1"),
    ],
)
def test_settings_that_are_not_fixed_may_change_on_resume(tmp_path: Path, change: str) -> None:
    create_run(tmp_path, "running")
    given = load("quickstart", (f"store.root={tmp_path}", change))
    check_resumable(run_folder("quickstart", given), given)


@pytest.mark.parametrize(
    "change", ["seed=5", "rollout.group_size=4", "start_model.steps=7", "train.epochs=2"]
)
def test_a_changed_fixed_setting_is_refused_with_both_values(tmp_path: Path, change: str) -> None:
    create_run(tmp_path, "running")
    given = load("quickstart", (f"store.root={tmp_path}", change))
    field, value = change.split("=")
    with pytest.raises(RunMismatchError) as refused:
        check_resumable(run_folder("quickstart", given), given)
    assert f"{field}: the run has" in str(refused.value)
    assert value in str(refused.value)


def test_a_resumed_run_keeps_the_servers_of_its_reference(tmp_path: Path) -> None:
    deployment = ("train.kl.reference=deployment", "train.kl.urls=[http://a:1]", "train.kl.coef=0.1")
    create_run(tmp_path, "running", *deployment)
    given = load("quickstart", (f"store.root={tmp_path}", *deployment, "train.kl.urls=[http://b:1]"))
    with pytest.raises(RunMismatchError, match=r"train\.kl\.urls: the run has \['http://a:1'\]"):
        check_resumable(run_folder("quickstart", given), given)


@pytest.mark.parametrize("change", ["train.epochs=2", "evaluate.n_prompts=7", "retrain.where=step > 1"])
def test_of_a_collection_only_settings_that_it_does_not_read_may_change(tmp_path: Path, change: str) -> None:
    create_run(tmp_path, "running", trains=False)
    given = load("quickstart", (f"store.root={tmp_path}", change))
    check_resumable(run_folder("quickstart", given), given, trains=False)
    other = load("quickstart", (f"store.root={tmp_path}", change, "rollout.group_size=4"))
    with pytest.raises(RunMismatchError) as refused:
        check_resumable(run_folder("quickstart", other), other, trains=False)
    assert "rollout.group_size: the run has" in str(refused.value)
    assert change.partition("=")[0] not in str(refused.value)


def test_a_finished_run_is_refused_unless_it_gets_more_steps(tmp_path: Path) -> None:
    create_run(tmp_path, "finished")
    same, more = (load("quickstart", (f"store.root={tmp_path}", each)) for each in ("steps=40", "steps=41"))
    with pytest.raises(RunFinishedError, match="--again"):
        check_resumable(run_folder("quickstart", same), same)
    check_resumable(run_folder("quickstart", more), more)


def test_a_run_is_renamed_to_the_first_free_name(tmp_path: Path) -> None:
    given = load("quickstart", (f"store.root={tmp_path}",))
    (tmp_path / "quickstart-1").mkdir()
    create_run(tmp_path, "finished")
    assert is_finished(run_folder("quickstart", given))
    move_aside(run_folder("quickstart", given), given.store)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["quickstart-1", "quickstart-2"]
    create_run(tmp_path, "running")
    assert not is_finished(run_folder("quickstart", given))


def test_a_run_that_is_written_to_keeps_its_name(tmp_path: Path) -> None:
    given = load("quickstart", (f"store.root={tmp_path}",))
    create_run(tmp_path, "finished")
    folder = run_folder("quickstart", given)
    # As rescore and annotate hold it.
    lock = lock_run(folder, given.store)
    with pytest.raises(RunLockedError, match="end that one first"):
        move_aside(folder, given.store, timeout_s=0.0)
    lock.release()
    move_aside(folder, given.store)
    create_run(tmp_path, "running")
    # Another command with --again has begun the new run meanwhile.
    move_aside(folder, given.store)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["quickstart", "quickstart-1"]


@pytest.mark.parametrize(("status", "names_again"), [("running", False), ("finished", True)])
def test_fewer_steps_than_are_done_are_refused(tmp_path: Path, status: str, names_again: bool) -> None:
    root = create_run(tmp_path, status)
    for step in range(4):
        shard = root / "batches" / f"step={step:06d}" / "000001-000001-0000000000000000.arrow"
        shard.parent.mkdir(parents=True)
        shard.touch()
    given = load("quickstart", (f"store.root={tmp_path}", "steps=3"))
    with pytest.raises(ConfigError, match="has already done 4 steps; give more") as refused:
        check_resumable(run_folder("quickstart", given), given)
    assert ("--again" in str(refused.value)) is names_again


def test_addresses_deadlines_and_settings_that_only_the_trainer_uses_may_change() -> None:
    free = {name for name, is_fixed in settings().items() if not is_fixed}
    assert {"steps", "train.lr", "train.clip_high", "evaluate.every", "store.root"} <= free
    addresses = {name for name in settings() if name.endswith(("_s", ".url", ".urls", ".port", "_env"))}
    # The time limit of a program decides its reward.
    of_programs = {"rollout.sandbox.timeout_s", "score.sandbox.timeout_s"}
    assert addresses - {"train.kl.urls"} - of_programs <= free


def test_settings_that_shape_rows_and_checkpoints_may_not_change() -> None:
    fixed = {name for name, is_fixed in settings().items() if is_fixed}
    assert {"seed", "model", "score.scorer", "rollout.temperature", "train.dtype", "serve.dtype"} <= fixed
    assert any(line.startswith("seed = 0 (fixed): ") for line in describe())
    assert any(line.startswith("train.lr = 1e-06: ") for line in describe())


def test_moving_a_run_on_s3_is_refused_with_the_command_that_moves_it() -> None:
    with pytest.raises(ConfigError, match=r"aws s3 mv --recursive s3://b/runs/a s3://b/runs/a-1"):
        check_movable(RunFolder("s3://b/runs/a"))


@pytest.mark.parametrize(
    ("given", "folder"),
    [("s3://bucket/runs/", "s3://bucket/runs/a"), ("s3://bucket", "s3://bucket/a"), ("runs//", "runs/a")],
)
def test_a_slash_at_the_end_of_the_root_makes_no_other_folder(given: str, folder: str) -> None:
    assert run_folder("a", validate_toy({"store": {"root": given}})).location == folder
