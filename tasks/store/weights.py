"""Weights in files, for servers that take them from a folder or from S3: PLACE/NAME/00000-of-00002.safetensors, one a rank.

They are whole when as many are there as their names say. A place is not a run's data: it may be removed at any time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.store.filesystem import files_of
from tasks.store.layout import S3, RunFolder

_SUFFIX = ".safetensors"


def weights_place(folder: RunFolder, run: str, configured: str) -> str:
    """Where a run's weights lie in files: below its folder, or below the configured one by the run's id."""
    return f"{configured.rstrip('/')}/{run}" if configured else f"{folder.absolute}/.tmp/weights"


def publish_part(place: str, name: str, rank: int, world_size: int, write: Callable[[Path], None]) -> str:
    """Make a rank's file of what `write` puts into a new local one: whole or not at all; returns where it is.

    Raises:
        StoreError: it could not be stored; names path and reason.
    """

    def named(path: Path) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        return f"{rank:05d}-of-{world_size:05d}{_SUFFIX}"

    folder = RunFolder(place)
    return folder.path(files_of(folder).publish(name, named))


def whole_weights(place: str, name: str) -> list[str]:
    """The files of the weights called `name`; none unless all are there."""
    folder = RunFolder(place)
    keys = files_of(folder).keys(f"{name}/*{_SUFFIX}")
    is_whole = keys and all(int(key.removesuffix(_SUFFIX).rpartition("-")[2]) == len(keys) for key in keys)
    return [folder.path(key) for key in keys] if is_whole else []


def remove_weights(place: str, *, but: str = "") -> None:
    """Remove all weights of a place, those called `but` left out.

    Raises:
        StoreError: one could not be removed; names path and reason.
    """
    files = files_of(RunFolder(place))
    files.remove(key for key in files.keys(f"*/*{_SUFFIX}") if key.partition("/")[0] != but)


def addresses(paths: Sequence[str], lifetime_s: float) -> list[str]:
    """Where a server reads files: their paths; of those on S3 addresses that are good for so many seconds, without credentials."""
    return [_address(path, lifetime_s) for path in paths]


def _address(path: str, lifetime_s: float) -> str:
    if not path.startswith(S3):
        return path
    from tasks.store.s3 import objects_of  # s3fs and botocore are imported where something lies on S3 alone

    folder, _, name = path.rpartition("/")
    return objects_of(RunFolder(folder)).address(name, lifetime_s)
