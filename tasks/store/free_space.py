"""Disk space: a step begins only if the disk has room for what it is expected to store."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rollmill.tasks.errors import DiskSpaceError
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import (
    PARTITION_KEYS,
    SCRATCH_ENV,
    RunFolder,
    checkpoint_key,
    partition_pattern,
)
from rollmill.tasks.store.run.resume import list_complete_checkpoints

# The next step is expected to store as much as the largest of so many steps before it.
LOOKED_AT = 5
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def check_room(
    folder: RunFolder, step: int, free: int, *, rows: int, checkpoint: int = 0, reserve: int
) -> None:
    """Raise DiskSpaceError, with the remedy, if a step's rows, a checkpoint and a reserve are more than the free bytes."""
    needed = rows + checkpoint + reserve
    if free >= needed:
        return
    parts = [f"{_format_bytes(rows)} for as many rows as in the largest of the last {LOOKED_AT} steps"]
    parts += [f"{_format_bytes(checkpoint)} for a checkpoint"] if checkpoint else []
    parts += [f"{_format_bytes(reserve)} that stay free"]
    place = "" if folder.is_local else f", or name a folder on a larger disk in {SCRATCH_ENV}"
    raise DiskSpaceError(
        f"step {step} was not begun: the disk of {folder.local} has {_format_bytes(free)} free, and "
        f"{_format_bytes(needed)} are needed: {', '.join(parts)}; make room{place}, and give the same command to resume"
    )


def free_bytes_at(folder: Path) -> int:
    """Return the number of free bytes of the disk that a folder is on."""
    return shutil.disk_usage(folder).free


class DiskSpaceGuard:
    """Checks before each step that the disk of the run's local folder has room for it.

    Args:
        folder: folder of the run.
        reserve_bytes: bytes that must stay free.
        first_checkpoint_bytes: expected size of the run's first checkpoint; later ones are as large as the last.
        n_open: number of steps before one that begins that may still grow.
        free: returns the free bytes at a folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        reserve_bytes: int,
        first_checkpoint_bytes: int,
        *,
        n_open: int = 1,
        free: Callable[[Path], int] = free_bytes_at,
    ) -> None:
        self._folder, self._reserve, self._first = folder, reserve_bytes, first_checkpoint_bytes
        self._n_open, self._free = n_open, free
        self._stored: dict[int, int] = {}

    def check(self, step: int, *, due: Sequence[int] = (), is_collected: bool = False) -> None:
        """Check that the disk has room for a step, before it is collected or trained; blocks the calling thread.

        Args:
            step: the step that is to begin.
            due: versions up to step + 1 that have or will have a checkpoint; an old one stays until a newer is complete.
            is_collected: True if its rollouts and scores are stored.

        Raises:
            DiskSpaceError: there is not enough room.
            StoreError: what is stored cannot be listed.
        """
        checkpoint = self._checkpoint_bytes(due) if due else 0
        rows = 0 if is_collected else self._largest_step_bytes(step)
        free = self._free(self._folder.local)
        check_room(self._folder, step, free, rows=rows, checkpoint=checkpoint, reserve=self._reserve)

    def _largest_step_bytes(self, step: int) -> int:
        """Return the stored bytes of the largest of the last five steps before `step`; with steps that may still grow, of as many more."""
        open_from = max(0, step - self._n_open)
        finished = range(max(0, open_from + 1 - LOOKED_AT), open_from)
        # A finished step does not grow, so it is looked up once; on S3 each look-up is a list request per data set.
        for each in finished:
            if each not in self._stored:
                self._stored[each] = self._step_bytes(each)
        sizes = [
            *(self._stored[each] for each in finished),
            *(self._step_bytes(each) for each in range(open_from, step)),
        ]
        return max(sizes, default=0)

    def _step_bytes(self, step: int) -> int:
        files = open_files(self._folder)
        patterns = [
            f"{partition_pattern(name, {key: step})}/*.arrow"
            for name, keys in PARTITION_KEYS.items()
            for key in keys
            if key in ("step", "version")
        ]
        return sum(sum(files.sizes(pattern).values()) for pattern in patterns)

    def _checkpoint_bytes(self, due: Sequence[int]) -> int:
        """Estimate the bytes still to be written of the checkpoints in `due` that are not complete."""
        complete, expected = list_complete_checkpoints(self._folder), self._first
        if complete:
            sizes = open_files(self._folder).sizes(f"{checkpoint_key(complete[-1])}/**/*")
            expected = sum(sizes.values())
        # What of a checkpoint is on this machine takes no more room; a run on S3 writes its checkpoints here first.
        local = open_files(RunFolder(self._folder.local))
        missing = [version for version in due if version > max(complete, default=-1)]
        written = (sum(local.sizes(f"{checkpoint_key(each)}/*").values()) for each in missing)
        return sum(max(0, expected - size) for size in written)


def _format_bytes(size: int) -> str:
    """Format a number of bytes with a decimal unit. Example: 1,234,567 bytes are 1.2 MB."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1.0, "bytes"))
    return f"{size / unit:.1f} {name}"
