"""Find a stored run by its location, or by its name below the default `store.root`."""

import os
from collections.abc import Iterable
from pathlib import Path

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.run.manifest import has_manifest

MAX_NAMED_RUNS = 10


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
    is_relative = "://" not in run and not Path(run).is_absolute()
    runs = _list_runs(StoreConfig().root)
    elsewhere = "; go to the project's folder, which has conf/ and runs/" if is_relative and not runs else ""
    remedy = f"there is no run in this folder ({MANIFEST} is missing){runs}{elsewhere}"
    raise ConfigError("RUN", run, remedy)


def distinct_runs(folders: Iterable[RunFolder]) -> list[RunFolder]:
    """Return each run once, as it is first named; names of the same folder may differ, such as a/b, /x/a/b and a link to it."""
    named: dict[str, RunFolder] = {}
    for folder in folders:
        named.setdefault(os.path.realpath(folder.location) if folder.is_local else folder.location, folder)
    return list(named.values())


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
