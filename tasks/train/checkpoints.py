"""A version's state in a run's folder, in a form that any number of ranks and every ZeRO stage can read.

CHECKPOINT/rank-00000-of-00002.safetensors   what each rank held of weights and moments; see state_files
CHECKPOINT/COMPLETE.json                     written last, and whole: without it the folder does not count; beside what the
                                             version is, size and XXH3-64 of each file
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from tasks.errors import StoreError
from tasks.store.checkpoint_files import StoredFile, check_sizes, describe, read_marker
from tasks.store.checkpoints import remove_other_copies, upload_file
from tasks.store.layout import CHECKPOINT_MARKER, RunFolder
from tasks.train.checkpoint_writer import Writing
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine
from tasks.train.process_group import is_first_here
from tasks.train.protocol import StepResult
from tasks.train.random_state import random_state, restore_random
from tasks.train.state_files import SUFFIX, Snapshot, StateFiles, restore

FORMAT = 2
"""Raised by whatever makes checkpoints that older readers do not understand."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a version is beside weights and moments.

    Attributes:
        run: random id of the run.
        version: policy version; batches 0 .. version - 1 are applied.
        digest: digest of the last batch applied; empty when there is none.
        n_updates: optimizer updates made so far: what the learning rate goes by.
        result: what the last step returned; None when there is none.
    """

    run: str
    version: int
    digest: str = ""
    n_updates: int = 0
    result: StepResult | None = None


def begin_checkpoint(
    engine: Engine, config: TrainConfig, progress: Progress, run: RunFolder, incarnation: int
) -> Writing:
    """Copy this rank's part of the state and its random generators', so that training may go on; returns what is to do.

    Args:
        engine: whose state it is.
        config: settings of the trainer.
        progress: where it stands.
        run: the run's folder.
        incarnation: the run's counter at the last load.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, version = engine.state, progress.version
    snapshot = Snapshot.take(state, state.own_parts(rank, world_size), random_state())
    name = f"rank-{rank:05d}-of-{world_size:05d}{SUFFIX}"
    folder = run.checkpoint(version)

    def write_own() -> dict[str, StoredFile]:
        if is_first_here() and not run.is_local:
            remove_other_copies(
                folder
            )  # rank 0's machine has no others, each further one has what it wrote before
        snapshot.write(folder / name)
        upload_file(run, version, name, incarnation)
        return {name: describe(folder / name)}

    def finish(files: dict[str, StoredFile]) -> None:
        unfinished = folder / f".{CHECKPOINT_MARKER}"
        unfinished.write_text(_marker_text(progress, config, files))
        unfinished.replace(folder / CHECKPOINT_MARKER)
        upload_file(run, version, CHECKPOINT_MARKER, incarnation)

    return Writing(version, write_own, finish, lambda: shutil.rmtree(folder, ignore_errors=True))


def restore_checkpoint(engine: Engine, folder: Path, rank: int) -> None:
    """Read a checkpoint that was checked; a collective.

    Random generators are restored where a rank of the same number wrote theirs.

    Raises:
        StoreError: it is of another model.
    """
    with StateFiles(folder) as files:
        restore(engine.state, files)
    with StateFiles(folder, f"rank-{rank:05d}-of-*{SUFFIX}") as own:
        restore_random(own.read_other)


def _marker_text(progress: Progress, config: TrainConfig, files: Mapping[str, StoredFile]) -> str:
    """What COMPLETE.json says; ranks, stage and type are for people, and for what a new incarnation says of bytes."""
    told = {"format": FORMAT, **asdict(progress), **_layout(config)}
    return json.dumps(told | {"files": {name: file.model_dump() for name, file in files.items()}}, indent=2)


def read_progress(folder: Path, run: str, version: int) -> Progress:
    """Our part of a checkpoint, checked before anything is loaded.

    Raises:
        StoreError: it is incomplete, of another run or version, or of an older form; or one of its files, which is
            named, is missing or has another size.
    """
    marker = folder / CHECKPOINT_MARKER
    try:
        stored = json.loads(marker.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"checkpoint {folder} is not complete: {error}") from error
    if stored.get("format") != FORMAT:
        raise StoreError(
            f"checkpoint {folder} has the form {stored.get('format', 1)}, this trainer reads {FORMAT} alone: go on with "
            "the Rollmill that wrote it; or remove it, and the run goes on from an older one, or from its start model, by "
            "applying all stored batches again"
        )
    for name, value in {"run": run, "version": version}.items():
        if stored[name] != value:
            raise StoreError(f"checkpoint {folder}: {name} is {stored[name]!r}, expected {value!r}")
    check_sizes(folder, read_marker(marker.read_bytes(), str(marker)).files or {})
    result = stored["result"]
    return Progress(
        run=stored["run"],
        version=stored["version"],
        digest=stored["digest"],
        n_updates=stored["n_updates"],
        result=StepResult.parse(result) if result else None,
    )


def _layout(config: TrainConfig) -> dict[str, object]:
    return {"ranks": config.ranks, "zero_stage": config.zero_stage, "dtype": config.dtype}
