"""A run's folder before it is opened: where it is, whether the run can be resumed, and which version to load from it."""

import re
from typing import Annotated

from pydantic import Field

from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig, RunConfig
from rollmill.flows.configuration.settings import find_fixed_settings
from rollmill.tasks.errors import ConfigError, RunFinishedError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.immutable_settings import check_immutable
from rollmill.tasks.store.run.lock import LOCK_TIMEOUT_S, lock_run
from rollmill.tasks.store.run.manifest import has_manifest, list_dependents, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints, list_done_steps
from rollmill.tasks.store.run.writable_run import check_run_kind

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$"

ADD_AGAIN = "add --again to move it aside and start a new run"

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
        # Only a finished run is moved aside.
        again = f", or {ADD_AGAIN}" if manifest.status == "finished" else ""
        remedy = f"{folder.location} has already done {n_done} steps; give more{again}"
        raise ConfigError("steps", config.steps, remedy)
    if manifest.status == "finished" and manifest.config["steps"] >= config.steps:
        raise RunFinishedError(
            f"{folder.location} has done all its {manifest.config['steps']} steps; raise steps to continue it, "
            f"or {ADD_AGAIN}"
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


def move_aside(folder: RunFolder, config: StoreConfig, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Rename a finished run's folder to NAME-N, with the smallest N from 1 that is free; a run that is not finished stays.

    Raises:
        RunLockedError: another process writes to the run, and does not end within `timeout_s`.
    """
    lock = lock_run(folder, config, timeout_s=timeout_s)
    try:
        # Another command may have begun the new run meanwhile.
        if is_finished(folder):
            n = 1
            while (moved := folder.local.with_name(f"{folder.name}-{n}")).exists():
                n += 1
            folder.local.rename(moved)
    finally:
        lock.release()


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
