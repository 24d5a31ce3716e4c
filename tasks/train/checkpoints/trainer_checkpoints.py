"""A version's state in a run's folder, in a form that any number of ranks and every ZeRO stage can read.

CHECKPOINT/rank-00000-of-00002.safetensors   what each rank held of weights and moments; see state_files
CHECKPOINT/COMPLETE.json                     written last, atomically: without it the folder is ignored; position in the run,
                                             and size and XXH3-64 of each file
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import (
    CheckpointMarker,
    StoredFile,
    check_files,
    describe_file,
    read_local_marker,
)
from rollmill.tasks.store.checkpoints.checkpoint_store import (
    publish_marker,
    remove_other_copies,
    upload_checkpoint_file,
)
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.train.checkpoints.checkpoint_writer import Writing
from rollmill.tasks.train.checkpoints.state_files import (
    SUFFIX,
    StateFiles,
    copy_state,
    restore_state,
    write_state,
)
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.ranks import is_first_on_machine

_CPU, _GPU = "random/cpu", "random/gpu"
_FIRST_SEED = 0


def seed_random() -> None:
    """Seed torch's generators as at the start of a run."""
    torch.manual_seed(_FIRST_SEED)


FORMAT = 2
"""Increased by every change that older readers would not understand."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Position of the trainer in a run: everything of a version but weights, moments and generators.

    Attributes:
        run: random id of the run.
        version: policy version; batches 0 .. version - 1 are applied.
        digest: digest of the last batch applied; empty when there is none.
        n_updates: optimizer updates made so far, which the learning-rate schedule counts.
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
    """Copy this rank's state and random generators to memory; returns the functions that write the checkpoint."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state, version = engine.state, progress.version
    tensors, parameters = copy_state(state, state.own_parts(rank, world_size))
    tensors[_CPU] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[_GPU] = torch.cuda.get_rng_state()
    name = f"rank-{rank:05d}-of-{world_size:05d}{SUFFIX}"
    folder = run.checkpoint(version)

    def write_own() -> dict[str, StoredFile]:
        # `clear_checkpoint` has removed them on rank 0's machine; each further one has what it wrote before.
        if is_first_on_machine() and not run.is_local:
            remove_other_copies(folder)
        write_state(folder / name, tensors, parameters)
        upload_checkpoint_file(run, version, name, incarnation)
        return {name: describe_file(folder / name)}

    def finish(files: dict[str, StoredFile]) -> None:
        marker = CheckpointMarker(
            format=FORMAT,
            run=progress.run,
            version=version,
            digest=progress.digest,
            n_updates=progress.n_updates,
            result=asdict(progress.result) if progress.result else None,
            # Ranks, stage and dtype show a resumed run whether it will be byte-exact.
            ranks=config.ranks,
            zero_stage=config.zero_stage,
            dtype=config.dtype,
            files=files,
        )
        publish_marker(run, marker, incarnation)

    return Writing(version, write_own, finish, lambda: shutil.rmtree(folder, ignore_errors=True))


def restore_checkpoint(engine: Engine, folder: Path, rank: int) -> None:
    """Load weights, moments and random generators of an already checked checkpoint into an engine; a collective.

    A rank's random generators are restored only if a rank of the same number wrote its own.

    Raises:
        StoreError: the checkpoint is of another model or of other trained parameters, or a file cannot be read.
    """
    with StateFiles(folder) as files:
        restore_state(engine.state, files)
    # Generators belong to a rank: with more ranks than before the further ones start from the seed.
    with StateFiles(folder, f"rank-{rank:05d}-of-*{SUFFIX}") as own:
        if (state := own.read_other(_CPU)) is not None:
            torch.set_rng_state(state)
        if torch.cuda.is_available() and (state := own.read_other(_GPU)) is not None:
            torch.cuda.set_rng_state(state)


def read_progress(folder: Path, run: str, version: int, *, reads_bytes: bool = False) -> Progress:
    """Check a checkpoint's marker and file sizes, with `reads_bytes` every byte, and return its position in the run.

    Raises:
        StoreError: it is incomplete, of another run or version, or of an older form; or one of its files, which is
            named, is missing or was changed.
    """
    marker = read_local_marker(folder)
    if marker.format != FORMAT:
        raise StoreError(
            f"checkpoint {folder} has format {marker.format}, this trainer reads {FORMAT} alone: resume with "
            "the Rollmill that wrote it; or remove it, and the run resumes from an older one, or from its start model, by "
            "applying all stored batches again"
        )
    for name, stored, value in (("run", marker.run, run), ("version", marker.version, version)):
        if stored != value:
            raise StoreError(f"checkpoint {folder}: {name} is {stored!r}, expected {value!r}")
    check_files(folder, marker.files or {}, reads_bytes=reads_bytes)
    result = msgspec.convert(marker.result, StepResult) if marker.result else None
    return Progress(marker.run, marker.version, marker.digest, marker.n_updates, result)
