"""Forks: a new run that begins at a step of another, with its earlier rows and a checkpoint copied bit for bit."""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.tasks.errors import ConfigError, ShardGoneError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import read_marker
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.filesystem import Files, open_files, publish_text
from rollmill.tasks.store.folders import (
    CHECKPOINT_MARKER,
    PARTITION_KEYS,
    PartitionValue,
    RunFolder,
    checkpoint_key,
    partition_pattern,
    step_from_key,
)
from rollmill.tasks.store.reader import read_listed
from rollmill.tasks.store.run.lock import lock_run
from rollmill.tasks.store.run.manifest import (
    ForkOrigin,
    Manifest,
    has_manifest,
    read_manifest,
    write_manifest,
)
from rollmill.tasks.store.run.resume import find_resume_point, list_complete_checkpoints
from rollmill.tasks.store.run.writable_run import RUN_ID_BYTES
from rollmill.tasks.store.shards.shard_names import current_shards

CHUNK_BYTES = 1 << 24


def fork_run(
    source: RunFolder,
    step: int,
    target: RunFolder,
    config: dict[str, Any],
    config_of: StoreConfig,
    by_step: Mapping[str, Any],
) -> None:
    """Begin a run at policy version `step` of another run, with copies of its earlier rows and last checkpoint.

    A second call, also after a kill, copies what is missing. A run that is forked completely is not changed. The source may be
    running; `config` is the resolved configuration of the new run, JSON values, `config_of` that of its data sets. `by_step` is as
    for `OpenRun.open`: the settings of the source's steps are recorded in the new run.

    Raises:
        ConfigError: the source has not trained so many steps, or the target is another run.
        RunLockedError: another process writes to the target.
        LeaseLostError: another process has taken the target over meanwhile.
        StoreError: something could not be read or written.
    """
    origin = read_manifest(source)
    n_stored = find_resume_point(source).stored_batches
    if not 0 <= step <= n_stored:
        remedy = f"{source.location} has {n_stored} trained steps; give a step from 0 to {n_stored}"
        raise ConfigError("STEP", step, remedy)
    lock = lock_run(target, config_of)
    try:
        files = open_files(target, lock.check)
        stored = read_manifest(target) if has_manifest(target) else None
        manifest = _target_manifest(origin, source, step, target, stored, config, by_step)
        if manifest.status == "forking":
            # A run that is "forking" cannot be resumed: a kill never leaves half a fork that looks like a run.
            write_manifest(files, manifest, stored)
            bring = partial(_copy_file, source, target, files)
            _copy_rows(source, step, bring)
            bring_checkpoint(source, step, manifest.run, files, bring)
            write_manifest(files, replace(manifest, status="running"), manifest)
    finally:
        lock.release()


def copy_partition(source: RunFolder, target: RunFolder, dataset: str, **partition: PartitionValue) -> None:
    """Copy the shards of a data set's partitions with the given values from one run to another; raises StoreError."""
    pattern = f"{partition_pattern(dataset, partition)}/*.arrow"
    files = open_files(source)
    bring = partial(_copy_file, source, target, open_files(target))
    read_listed(lambda: current_shards(files.keys(pattern)), bring)


def _target_manifest(
    origin: Manifest,
    source: RunFolder,
    step: int,
    target: RunFolder,
    found: Manifest | None,
    config: dict[str, Any],
    by_step: Mapping[str, Any],
) -> Manifest:
    """Return the target's stored manifest, or a new one whose epochs continue those of the source; ConfigError if it is not of this fork."""
    last = ForkOrigin(origin.run, source.absolute, step, origin.config)
    if found:
        if [(each.run, each.step) for each in found.origins[-1:]] != [(last.run, last.step)]:
            remedy = f"{target.location} is another run, not a fork of {source.location} at step {step}"
            raise ConfigError("--name", target.name, f"{remedy}; give another name")
        # The source may have been opened since, and shards of that epoch are copied too.
        return replace(found, epoch=max(found.epoch, origin.epoch))
    before = (replace(each, step=min(each.step, step)) for each in origin.origins)
    # The epoch stays: copied shards keep their names, and those of the new run must come after them.
    return replace(
        origin,
        run=secrets.token_hex(RUN_ID_BYTES),
        incarnation=0,
        config=config,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        status="forking",
        origins=(*before, last),
        trains=True,
        earlier_settings=origin.keep_earlier_settings(step, None, by_step),
    )


def _copy_rows(source: RunFolder, step: int, bring: Callable[[str], None]) -> None:
    """Copy the shards of all steps and evaluated versions before `step`."""
    files = open_files(source)
    for dataset, partition_keys in PARTITION_KEYS.items():
        if partition_keys[-1] in ("step", "version"):
            # The source may be running, and a shard may be compacted between listing and copying: `read_listed` lists again.
            read_listed(partial(_list_shards_before, files, dataset, step), bring)


def _list_shards_before(files: Files, dataset: str, step: int) -> list[str]:
    found = []
    for key in current_shards(files.keys(f"{partition_pattern(dataset, {})}/*.arrow")):
        if (own := step_from_key(key)) is None:
            raise StoreError(f"{key} is no shard of a step")
        found += [key] if own < step else []
    return found


def bring_checkpoint(
    source: RunFolder, step: int, run: str, target: Files, bring: Callable[[str], None]
) -> None:
    """Bring the newest complete checkpoint up to version `step`; its marker, with the id `run`, is written last.

    If the source, which may be running, removes the checkpoint meanwhile, the one before takes its place.

    Raises:
        ShardGoneError: a file is missing of a checkpoint that is not removed.
    """
    version = None
    while True:
        before, stored = version, list_complete_checkpoints(source)
        version = max((each for each in stored if each <= step), default=None)
        if version is None:
            return
        try:
            _copy_checkpoint(source, version, run, target, bring)
        except ShardGoneError:
            if version == before:
                raise
        else:
            return


def _copy_checkpoint(
    source: RunFolder, version: int, run: str, target: Files, bring: Callable[[str], None]
) -> None:
    files, folder = open_files(source), checkpoint_key(version)
    marker = f"{folder}/{CHECKPOINT_MARKER}"
    for key in files.keys(f"{folder}/**/*"):
        is_folder = source.is_local and (source.local / key).is_dir()
        if key != marker and not is_folder:
            bring(key)
    # Last, since the marker makes the checkpoint complete.
    forked = read_marker(source, version).model_copy(update={"run": run})
    publish_text(target, marker, forked.to_bytes())


def _copy_file(source: RunFolder, target: RunFolder, files: Files, key: str) -> None:
    """Copy one file between runs; a hard link if both are on the same disk."""
    if source.is_local and target.is_local:
        path = target.local / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            # It exists, or is on another disk.
            os.link(source.local / key, path)
        if path.exists():
            return
    folder, _, name = key.rpartition("/")

    def write(path: Path) -> str:
        with open_files(source).open(key) as file, path.open("wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)
        return name

    files.publish(folder, write)
