"""A run's folder before it is opened: where it is, whether the run can be resumed, and which version to load from it."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollmill.flows.config import AnnotateConfig, RescoreConfig, RunConfig
from rollmill.flows.settings import find_fixed_settings
from rollmill.tasks.errors import ConfigError, RunFinishedError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.run.immutable_settings import check_immutable
from rollmill.tasks.store.run.manifest import has_manifest, list_dependents, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints, list_done_steps
from rollmill.tasks.store.run.writable_run import check_run_kind

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$"

MAX_NAMED_RUNS = 10

# A run's name as a flow's parameter; the form of Prefect's UI refuses other characters.
RunName = Annotated[str, Field(pattern=RUN_NAME)]


def run_folder(name: str, config: RunConfig | RescoreConfig | AnnotateConfig) -> RunFolder:
    """Return the folder `store.root`/NAME of a run; ConfigError if the name has characters that a folder may not have."""
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError(
            "run name",
            name,
            "use only letters, digits and . _ -, begin with a letter or digit, and at most 200 characters",
        )
    return RunFolder(f"{config.store.root}/{name}")


def store_root(folder: RunFolder) -> str:
    """Return the parent of a run's folder, its `store.root`. Example: that of s3://bucket/runs/a is s3://bucket/runs."""
    parent, slash, _ = folder.location.rpartition("/")
    return parent if slash else "."


def check_run(folder: RunFolder) -> None:
    """Raise ConfigError if a folder has no run; the error lists the runs next to it."""
    if has_manifest(folder):
        return
    remedy = f"there is no run in {folder.location} ({MANIFEST} is missing){_list_runs(store_root(folder))}"
    raise ConfigError("run name", folder.name, remedy)


def is_run(run: str) -> bool:
    """Return True if `find_run` finds a run of this location or name."""
    return any(has_manifest(folder) for folder in _candidate_folders(run))


def find_run(run: str) -> RunFolder:
    """Return the folder of a run, given its location or its name below the default `store.root`.

    Raises:
        ConfigError: there is no such run; names the runs that exist.
    """
    for folder in _candidate_folders(run):
        if has_manifest(folder):
            return folder
    remedy = f"there is no run in this folder ({MANIFEST} is missing){_list_runs(StoreConfig().root)}"
    raise ConfigError("RUN", run, remedy)


def _list_runs(root: str) -> str:
    """Return the end of an error message that lists the runs below the local folder `root`; empty without any."""
    # For runs on S3 none are found: listing a bucket may take minutes.
    known = sorted(path.parent.name for path in Path(root).glob(f"*/{MANIFEST}"))
    more = f" and {len(known) - MAX_NAMED_RUNS} more" if len(known) > MAX_NAMED_RUNS else ""
    return f"; runs in {root}/ are {', '.join(known[:MAX_NAMED_RUNS])}{more}" if known else ""


def _candidate_folders(run: str) -> list[RunFolder]:
    """Return the folders where a run may be: `run` as a location, and if it has no slash, as a name in the default root."""
    # "." and ".." have no folder name, which messages and moved runs need.
    is_relative = run.rpartition("/")[2] in (".", "..")
    folders = [RunFolder(Path(run).resolve() if is_relative else run)]
    return folders if "/" in run else [*folders, RunFolder(f"{StoreConfig().root}/{run}")]


def check_resumable(folder: RunFolder, config: RunConfig, *, trains: bool = True) -> None:
    """Refuse to resume a run that is finished, or with settings that would make it another run.

    Args:
        folder: of the run; without one, nothing is checked.
        config: all settings.
        trains: False for the flow collect, which resumes only its own runs.

    Raises:
        ConfigError: it has done more steps than `steps`.
        RunFinishedError: all its steps are done.
        RunMismatchError: names every setting that differs, with both values.
    """
    if not has_manifest(folder):
        return
    manifest = read_manifest(folder)
    check_run_kind(folder, manifest, trains=trains)
    fixed = find_fixed_settings(trains=trains)
    check_immutable(folder.location, manifest.config, config.model_dump(mode="json"), fixed)
    n_done = len(list_done_steps(folder, manifest))
    if config.steps < n_done:
        raise ConfigError(
            "steps", config.steps, f"{folder.location} has already done {n_done} steps; give more"
        )
    if manifest.status == "finished" and manifest.config["steps"] >= config.steps:
        raise RunFinishedError(
            f"{folder.location} has done all its {manifest.config['steps']} steps; raise steps to continue it, "
            "or add --again to move it aside and start a new run"
        )


def is_finished(folder: RunFolder) -> bool:
    """Return True if the folder has a run whose run.json says that all its steps are done."""
    return has_manifest(folder) and read_manifest(folder).status == "finished"


def check_movable(folder: RunFolder) -> None:
    """Raise ConfigError if a run cannot be moved aside: it is on S3, or another run was trained from it.

    Raises:
        ConfigError: gives the command to move it on S3, or names the runs trained from it.
    """
    if not folder.is_local:
        to = f"{folder.location}-1"
        remedy = (
            f"{folder.location} is on S3, where many objects cannot be renamed at once; choose another --name, or move it: "
            f"aws s3 mv --recursive {folder.location} {to}"
        )
        raise ConfigError("--again", True, remedy)
    if retrained := list_dependents(folder):
        remedy = (
            f"{folder.location} is not moved aside: {', '.join(retrained)} was trained from it and reads its rollouts "
            "there; choose another --name"
        )
        raise ConfigError("--again", True, remedy)


def move_aside(folder: RunFolder) -> None:
    """Rename a run's folder to NAME-N, with the smallest N from 1 that is free."""
    n = 1
    while (moved := folder.local.with_name(f"{folder.name}-{n}")).exists():
        n += 1
    folder.local.rename(moved)


# Means the newest version that has a checkpoint.
LAST_VERSION = -1


def choose_version(folder: RunFolder, wanted: int) -> int:
    """Return `wanted`, or, if it is negative, the last policy version with a checkpoint (0 if there is none).

    Raises:
        ConfigError: `wanted` is above 0 and has no checkpoint; names the versions that have one.
    """
    # Version 0 is the start model, which needs no checkpoint.
    stored = sorted({0, *list_complete_checkpoints(folder)})
    if wanted < 0:
        return stored[-1]
    if wanted not in stored:
        there_are = ", ".join(map(str, stored[1:])) or "no version"
        remedy = f"{folder.location} has checkpoints of {there_are}; give one of them, 0 for the start model, or -1 for the last"
        raise ConfigError("version", wanted, remedy)
    return wanted
