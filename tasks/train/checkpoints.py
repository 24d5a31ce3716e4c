"""A version's state on disk: weights and moments as DeepSpeed writes them, and our own beside them.

CHECKPOINT/state/...       DeepSpeed's files, one or more a rank
CHECKPOINT/COMPLETE.json   written last, and whole: without it the folder does not count; size and XXH3-64 of each file

DeepSpeed knows local folders alone, so a run on S3 has its checkpoint uploaded from one, the marker last.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from tasks.errors import StoreError
from tasks.store.checkpoint_files import check_sizes, list_files, read_marker
from tasks.store.checkpoints import upload_checkpoint
from tasks.store.filesystem import empty
from tasks.store.layout import RunFolder, checkpoint_key
from tasks.train.config import TrainConfig
from tasks.train.engine import Engine
from tasks.train.protocol import StepResult

_TAG = "state"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a version is beside weights and moments.

    Attributes:
        run: random id of the run.
        version: policy version; batches 0 .. version - 1 are applied.
        digest: digest of the last batch applied; empty when there is none.
        n_updates: optimizer updates made so far.
        result: what the last step returned; None when there is none.
    """

    run: str
    version: int
    digest: str = ""
    n_updates: int = 0
    result: StepResult | None = None


def save_checkpoint(
    engine: Engine, config: TrainConfig, progress: Progress, folder: str, incarnation: int
) -> str:
    """Write RUN/checkpoints/version=... anew; a collective. Returns where it lies.

    `incarnation` is the run's counter at the last load.

    Raises:
        LeaseLostError: on rank 0, the run is on S3, and a newer trainer has loaded it.
        StoreError: on rank 0, it could not be uploaded; it is as if it had not been written.
    """
    run, is_writer = RunFolder(folder), dist.get_rank() == 0
    checkpoint = run.checkpoint(progress.version)
    if is_writer:
        empty(checkpoint)
    dist.barrier()
    engine.save(str(checkpoint), _TAG)
    dist.barrier()
    if is_writer:
        _mark(run.checkpoint_marker(progress.version), config, progress)
        upload_checkpoint(run, progress.version, incarnation)
    return run.path(checkpoint_key(progress.version))


def restore_checkpoint(engine: Engine, folder: Path) -> None:
    """Read weights and moments of a checkpoint that was checked; a collective."""
    engine.restore(str(folder), _TAG)


def read_progress(folder: Path, config: TrainConfig, run: str, version: int) -> Progress:
    """Our part of a checkpoint, checked before anything is loaded.

    Raises:
        StoreError: it is incomplete, of another run or version, or was written by other ranks than ours; or one of its
            files, which is named, is missing or has another size.
    """
    marker = folder / "COMPLETE.json"
    try:
        stored = json.loads(marker.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"checkpoint {folder} is not complete: {error}") from error
    files = read_marker(marker.read_bytes(), str(marker)).files
    wanted = {"run": run, "version": version, **_layout(config)}
    for name, value in wanted.items():
        if stored[name] != value:
            raise StoreError(f"checkpoint {folder}: {name} is {stored[name]!r}, expected {value!r}")
    check_sizes(folder, files or {})
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


def _mark(marker: Path, config: TrainConfig, progress: Progress) -> None:
    unfinished = marker.with_name(".COMPLETE.json")
    files = {name: file.model_dump() for name, file in list_files(marker.parent).items()}
    unfinished.write_text(json.dumps(asdict(progress) | _layout(config) | {"files": files}, indent=2))
    unfinished.replace(marker)
