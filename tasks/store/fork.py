"""A new run that begins at a step of another: its earlier rows and a checkpoint are brought over, bit for bit."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError, StoreError
from tasks.store.config import StoreConfig
from tasks.store.filesystem import Files, files_of, publish_text, read_text
from tasks.store.layout import (
    CHECKPOINT_MARKER,
    PARTITION_KEYS,
    PartitionValue,
    RunFolder,
    checkpoint_key,
    partition_pattern,
)
from tasks.store.lock import lock_run
from tasks.store.manifest import Manifest, Origin, has_manifest, read_manifest, write_manifest
from tasks.store.names import current
from tasks.store.reader import read_listed
from tasks.store.resume import complete_checkpoints, resume_point
from tasks.store.run import RUN_ID_BYTES

CHUNK_BYTES = 1 << 24


def fork(
    source: RunFolder, step: int, target: RunFolder, config: dict[str, Any], config_of: StoreConfig
) -> None:
    """Begin a run at policy version `step` of another: what it has of the steps before, and its last checkpoint.

    Called again, after a kill too, it brings over what is missing; a run that has been forked so is left as it is.

    Args:
        source: the run to fork; it may be going on.
        step: of its stored batches those before this step are the new run's.
        target: of the new run; made when it is not there.
        config: resolved configuration of the new run, JSON values.
        config_of: its settings of the data sets.

    Raises:
        ConfigError: the source has not trained so many steps, or the target is another run.
        RunLockedError: another process writes to the target.
        LeaseLostError: another process has taken the target over meanwhile.
        StoreError: something could not be read or written.
    """
    origin = read_manifest(source)
    n_stored = resume_point(source).stored_batches
    if not 0 <= step <= n_stored:
        remedy = f"{source.location} has {n_stored} trained steps; give a step from 0 to {n_stored}"
        raise ConfigError("STEP", step, remedy)
    lock = lock_run(target, config_of)
    try:
        files = files_of(target, lock.check)
        stored = read_manifest(target) if has_manifest(target) else None
        manifest = _target(origin, source, step, target, stored, config)
        if manifest.status == "forking":
            write_manifest(files, manifest, stored)
            bring = partial(_bring, source, target, files)
            _bring_rows(source, step, bring)
            _bring_checkpoint(source, step, manifest.run, files, bring)
            write_manifest(files, replace(manifest, status="running"), manifest)
    finally:
        lock.release()


def bring_partition(source: RunFolder, target: RunFolder, dataset: str, **partition: PartitionValue) -> None:
    """Give a run what a data set of another has in a partition, or in all that agree with what is given of one.

    Raises:
        StoreError: something could not be read or written.
    """
    pattern = f"{partition_pattern(dataset, partition)}/*.arrow"
    files = files_of(source)
    bring = partial(_bring, source, target, files_of(target))
    read_listed(lambda: current(files.keys(pattern)), bring)


def _target(
    origin: Manifest,
    source: RunFolder,
    step: int,
    target: RunFolder,
    found: Manifest | None,
    config: dict[str, Any],
) -> Manifest:
    """The new run's manifest: the one that it has, or a new one, whose writers' epochs follow the source's."""
    last = Origin(origin.run, source.absolute, step, origin.config)
    if found:
        if [(each.run, each.step) for each in found.origins[-1:]] != [(last.run, last.step)]:
            remedy = (
                f"{target.location} is a run already, and none forked from {source.location} at step {step}"
            )
            raise ConfigError("--name", target.name, f"{remedy}; give another name")
        return found
    before = (replace(each, step=min(each.step, step)) for each in origin.origins)
    return Manifest(
        run=secrets.token_hex(RUN_ID_BYTES),
        incarnation=0,
        epoch=origin.epoch,
        schema_version=origin.schema_version,
        config=config,
        versions=origin.versions,
        git_commit=origin.git_commit,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        status="forking",
        origins=(*before, last),
        sources=origin.sources,
    )


def _bring_rows(source: RunFolder, step: int, bring: Callable[[str], None]) -> None:
    """The shards of all steps, and evaluated versions, before `step`."""
    files = files_of(source)
    for dataset, partition_keys in PARTITION_KEYS.items():
        if partition_keys[-1] in ("step", "version"):
            pattern = f"{partition_pattern(dataset, {})}/*.arrow"
            read_listed(partial(_shards_before, files, pattern, step), bring)


def _shards_before(files: Files, pattern: str, step: int) -> list[str]:
    return [key for key in current(files.keys(pattern)) if _number(key) < step]


def _number(key: str) -> int:
    """The step, or version, of a shard's partition."""
    match = re.search(r"/(?:step|version)=(\d+)/[^/]+$", key)
    if match is None:
        raise StoreError(f"{key} is no shard of a step")
    return int(match[1])


def _bring_checkpoint(
    source: RunFolder, step: int, run: str, target: Files, bring: Callable[[str], None]
) -> None:
    """The last complete checkpoint of a version up to `step`, as the new run's; its marker last."""
    version = max((each for each in complete_checkpoints(source) if each <= step), default=None)
    if version is None:
        return
    files, folder = files_of(source), checkpoint_key(version)
    marker = f"{folder}/{CHECKPOINT_MARKER}"
    for key in files.keys(f"{folder}/**/*"):
        is_folder = source.is_local and (source.local / key).is_dir()
        if key != marker and not is_folder:
            bring(key)
    progress = json.loads(read_text(files, marker)) | {"run": run}
    publish_text(target, marker, json.dumps(progress, indent=2).encode())


def _bring(source: RunFolder, target: RunFolder, files: Files, key: str) -> None:
    """One file: a further name of the same one where both lie on one disk, else a copy."""
    if source.is_local and target.is_local:
        path = target.local / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # it is there, or lies on another disk, where it is copied
            os.link(source.local / key, path)
        if path.exists():
            return
    folder, _, name = key.rpartition("/")

    def write(path: Path) -> str:
        with files_of(source).open(key) as file, path.open("wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
        return name

    files.publish(folder, write)
