"""Room on the disk: what the next step is expected to need is there before it begins, or it does not begin."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import DiskSpaceError
from tasks.store.filesystem import files_of
from tasks.store.layout import PARTITION_KEYS, SCRATCH_ENV, RunFolder, checkpoint_key, partition_pattern
from tasks.store.resume import complete_checkpoints

LOOKED_AT = 5
"""Steps before the next one of which the largest says what that will store."""
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class Need:
    """What a step is expected to put on the disk, in bytes.

    Attributes:
        rows: its shards.
        checkpoint: the one that is due after it; 0 when none is.
        reserve: to stay free.
    """

    rows: int
    checkpoint: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it together."""
        return self.rows + self.checkpoint + self.reserve


def plan_need(stored: dict[int, int], step: int, checkpoint: int, reserve: int) -> Need:
    """What a step is expected to need, by the bytes that the steps before it have stored.

    Example: plan_need({0: 9, 4: 5, 5: 7}, 6, 0, 1) has 7 bytes of rows: step 0 is too long ago.
    """
    recent = [size for each, size in stored.items() if step - LOOKED_AT <= each < step]
    return Need(max(recent, default=0), checkpoint, reserve)


def check_room(need: Need, free_bytes: int, step: int, folder: RunFolder) -> None:
    """Refuse a step that the disk would not hold.

    Raises:
        DiskSpaceError: says how much is there, how much is needed, and what to do.
    """
    if free_bytes >= need.total:
        return
    parts = [f"{_text(need.rows)} for rows as the largest of the last {LOOKED_AT} steps has them"]
    parts += [f"{_text(need.checkpoint)} for a checkpoint"] if need.checkpoint else []
    parts += [f"{_text(need.reserve)} that stay free (store.min_free_bytes)"]
    place = "" if folder.is_local else f", or name a folder on a larger disk in {SCRATCH_ENV}"
    raise DiskSpaceError(
        f"step {step} was not begun: the disk of {folder.local} has {_text(free_bytes)} free, and "
        f"{_text(need.total)} are needed: {', '.join(parts)}; make room{place}, and the same command goes on"
    )


def free_bytes_at(folder: Path) -> int:
    """Bytes that this user may still write to the disk of a folder."""
    return shutil.disk_usage(folder).free


class Space:
    """Looks, before each step of a run, whether the disk under the run's local folder will hold it.

    Args:
        folder: of the run.
        reserve_bytes: to stay free.
        first_checkpoint_bytes: expected of the run's first checkpoint; of later ones, the last one tells.
        free: the free bytes at a folder.
    """

    def __init__(
        self,
        folder: RunFolder,
        reserve_bytes: int,
        first_checkpoint_bytes: int,
        free: Callable[[Path], int] = free_bytes_at,
    ) -> None:
        self._folder, self._reserve, self._first = folder, reserve_bytes, first_checkpoint_bytes
        self._free = free
        self._stored: dict[int, int] = {}

    def check(self, step: int, *, due: Sequence[int] = (), is_collected: bool = False) -> None:
        """Called before a step is collected, and before it is trained; blocks, so it is called from a thread.

        Args:
            step: that is to begin.
            due: versions up to step + 1 that have a checkpoint, or will; an older one stays until a newer is complete.
            is_collected: True when its rollouts and scores are stored.

        Raises:
            DiskSpaceError: the disk will not hold it.
            StoreError: what is stored cannot be listed.
        """
        checkpoint = self._checkpoint_bytes(due) if due else 0
        stored = {} if is_collected else self._bytes_by_step(step)
        need = plan_need(stored, step, checkpoint, self._reserve)
        check_room(need, self._free(self._folder.local), step, self._folder)

    def _bytes_by_step(self, step: int) -> dict[int, int]:
        """Of the last steps before one; what a finished step has is looked up once."""
        for each in range(max(0, step - LOOKED_AT), step - 1):
            if each not in self._stored:
                self._stored[each] = self._step_bytes(each)
        last = {step - 1: self._step_bytes(step - 1)} if step else {}
        return self._stored | last

    def _step_bytes(self, step: int) -> int:
        files = files_of(self._folder)
        patterns = [
            f"{partition_pattern(name, {key: step})}/*.arrow"
            for name, keys in PARTITION_KEYS.items()
            for key in keys
            if key in ("step", "version")
        ]
        return sum(sum(files.sizes(pattern).values()) for pattern in patterns)

    def _checkpoint_bytes(self, due: Sequence[int]) -> int:
        """What is not written yet of the checkpoints that are due and not complete."""
        complete, expected = complete_checkpoints(self._folder), self._first
        if complete:
            sizes = files_of(self._folder).sizes(f"{checkpoint_key(complete[-1])}/**/*")
            expected = sum(sizes.values())
        missing = [version for version in due if version > max(complete, default=-1)]
        return sum(max(0, expected - self._written_bytes(version)) for version in missing)

    def _written_bytes(self, version: int) -> int:
        """What lies on this machine of a checkpoint."""
        local = files_of(RunFolder(self._folder.local))
        return sum(local.sizes(f"{checkpoint_key(version)}/*").values())


def _text(size: int) -> str:
    """Example: 1,234,567 bytes are 1.2 MB."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1.0, "bytes"))
    return f"{size / unit:.1f} {name}"
