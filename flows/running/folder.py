"""A run's folder before it is opened: where it lies, whether it can be gone on with, out of the way when it is done."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flows.config import RescoreConfig, RunConfig
from flows.settings import fixed_settings
from tasks.errors import ConfigError, RunFinishedError
from tasks.store.config import StoreConfig
from tasks.store.fixed import check_fixed
from tasks.store.kind import check_kind, done_steps
from tasks.store.layout import MANIFEST, RunFolder
from tasks.store.manifest import has_manifest, read_manifest
from tasks.store.sources import trained_from

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"

RunName = Annotated[str, Field(pattern=RUN_NAME)]
"""A run's name as a flow's parameter: the run form of Prefect's UI refuses another."""


def run_folder(name: str, config: RunConfig | RescoreConfig) -> RunFolder:
    """Where a run lies; ConfigError when the name is not that of a folder below `store.root`."""
    if not re.fullmatch(RUN_NAME, name):
        raise ConfigError("run name", name, "give letters, digits and . _ - only, a letter or digit first")
    return RunFolder(f"{config.store.root}/{name}")


def root_of(folder: RunFolder) -> str:
    """The `store.root` below which a run lies. Example: that of s3://bucket/runs/a is s3://bucket/runs."""
    parent, slash, _ = folder.location.rpartition("/")
    return parent if slash else "."


def check_run(folder: RunFolder) -> None:
    """Refuse a folder that holds no run; ConfigError names those beside it."""
    if has_manifest(folder):
        return
    known = sorted(path.parent.name for path in Path(root_of(folder)).glob(f"*/{MANIFEST}"))
    there_are = f"; runs in {root_of(folder)}/ are {', '.join(known)}" if known else ""
    remedy = f"there is no run in {folder.location} ({MANIFEST} is missing){there_are}"
    raise ConfigError("run name", folder.name, remedy)


def is_run(run: str) -> bool:
    """True when this names a run, as for `existing_run`."""
    return any(has_manifest(place) for place in _places(run))


def existing_run(run: str) -> RunFolder:
    """The folder of a run that is named by its location, or by the name of its folder below `store.root`'s default.

    Raises:
        ConfigError: there is no run; names those that there are.
    """
    for place in _places(run):
        if has_manifest(place):
            return place
    root = StoreConfig().root
    known = sorted(path.parent.name for path in Path(root).glob(f"*/{MANIFEST}"))
    there_are = f"; runs in {root}/ are {', '.join(known)}" if known else ""
    raise ConfigError("RUN", run, f"there is no run in this folder ({MANIFEST} is missing){there_are}")


def _places(run: str) -> list[RunFolder]:
    """Where a run may lie that is named so."""
    is_here = run.rpartition("/")[2] in (".", "..")
    places = [RunFolder(Path(run).resolve() if is_here else run)]
    return places if "/" in run else [*places, RunFolder(f"{StoreConfig().root}/{run}")]


def check_resumable(folder: RunFolder, config: RunConfig, *, trains: bool = True) -> None:
    """Refuse to go on with a run that is finished, or under settings that would make another run of it.

    `trains` is False for the flow collect, which goes on with its own runs alone.

    Raises:
        ConfigError: it has done more steps than are asked for.
        RunFinishedError: all its steps are done.
        RunMismatchError: names every setting that differs, and both its values.
    """
    if not has_manifest(folder):
        return
    manifest = read_manifest(folder)
    check_kind(folder, manifest, trains=trains)
    check_fixed(folder.location, manifest.config, config.model_dump(mode="json"), fixed_settings())
    n_done = len(done_steps(folder, manifest))
    if config.steps < n_done:
        raise ConfigError(
            "steps", config.steps, f"{folder.location} has done {n_done} steps already; give more"
        )
    if manifest.status == "finished" and manifest.config["steps"] >= config.steps:
        raise RunFinishedError(
            f"{folder.location} has done all its {manifest.config['steps']} steps; raise steps to go on with it, "
            "or add --again to move it aside and start anew"
        )


def is_finished(folder: RunFolder) -> bool:
    """True when a run lies there and has done all its steps."""
    return has_manifest(folder) and read_manifest(folder).status == "finished"


def check_movable(folder: RunFolder) -> None:
    """Refuse to move a run aside that lies on S3, whose many objects cannot be renamed at once, or that is a source.

    Raises:
        ConfigError: it lies on S3, or a run beside it was trained from it.
    """
    if not folder.is_local:
        to = f"{folder.location}-1"
        remedy = (
            f"{folder.location} lies on S3 and is not moved aside; begin under another --name, or move it yourself: "
            f"aws s3 mv --recursive {folder.location} {to}"
        )
        raise ConfigError("--again", True, remedy)
    if retrained := trained_from(folder):
        remedy = (
            f"{folder.location} is not moved aside: {', '.join(retrained)} was trained from it, and finds its rollouts "
            "where they lie; begin under another --name"
        )
        raise ConfigError("--again", True, remedy)


def move_aside(folder: RunFolder) -> None:
    """Rename a run to NAME-N, with the first N that is free."""
    n = 1
    while (moved := folder.local.with_name(f"{folder.name}-{n}")).exists():
        n += 1
    folder.local.rename(moved)
