"""The files of a checkpoint, as its marker lists them: the size and the XXH3-64 of each."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import ShardError, StoreError
from tasks.store.filesystem import Files

CHUNK_BYTES = 1 << 24


class StoredFile(BaseModel):
    """A file of a checkpoint.

    Attributes:
        bytes: its size.
        xxh3_64: of all of it, 16 hex digits.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    bytes: Annotated[int, Field(ge=0)]
    xxh3_64: str


class Marker(BaseModel):
    """What COMPLETE.json says of the stored files.

    Attributes:
        digest: of the last batch applied; empty when there is none.
        ranks: that wrote it; 0 in one that does not say.
        zero_stage: that they trained under; -1 in one that does not say.
        files: by their paths below the checkpoint, the marker itself left out; None in one that lists none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    digest: str = ""
    ranks: int = 0
    zero_stage: int = -1
    files: dict[str, StoredFile] | None = None


def read_marker(text: bytes, where: str) -> Marker:
    """Raises StoreError, which names the file, when it is none."""
    try:
        return Marker.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise StoreError(f"{where} is damaged: {place}: {first['msg']}") from error


def describe(path: Path) -> StoredFile:
    """Size and hash of a file on this machine, read once."""
    with pa.OSFile(str(path)) as source:
        return StoredFile(bytes=path.stat().st_size, xxh3_64=_hash(source))


def check_sizes(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Refuse a checkpoint on this machine of which a file is missing or has another size.

    Raises:
        StoreError: names the file, what was expected and what is there.
    """
    for name, told in files.items():
        path = folder / name
        if not path.is_file():
            raise StoreError(f"checkpoint {folder} is damaged: {path} is missing")
        if (size := path.stat().st_size) != told.bytes:
            raise StoreError(
                f"checkpoint {folder} is damaged: {path} has {size} bytes, and was written with {told.bytes}"
            )


def check_bytes(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Refuse a checkpoint on this machine of which a file is not what was written; every byte is read.

    Raises:
        StoreError: names the file.
    """
    check_sizes(folder, files)
    for name, told in files.items():
        if describe(folder / name) != told:
            raise StoreError(
                f"checkpoint {folder} is damaged: the bytes of {folder / name} are not those that were written; restore it "
                "from a copy, or take another version"
            )


def wrong_files(files: Files, folder: str, listed: Mapping[str, StoredFile]) -> Iterator[tuple[str, str]]:
    """The key of each file of a stored checkpoint that is not what was written, and what is wrong with it.

    Args:
        files: of the run.
        folder: the checkpoint's, below the run's.
        listed: by its marker.
    """
    sizes = files.sizes(f"{folder}/**/*")
    for name, told in listed.items():
        key = f"{folder}/{name}"
        if key not in sizes:
            yield key, f"it is missing: it was written with {told.bytes} bytes"
        elif sizes[key] != told.bytes:
            yield key, f"it has {sizes[key]} bytes, and was written with {told.bytes}"
        else:
            try:
                with files.open(key) as source:
                    if _hash(source) != told.xxh3_64:
                        yield key, "its bytes are not those that were written"
            except (ShardError, OSError) as error:
                yield key, str(error)


def _hash(source: pa.NativeFile) -> str:
    digest = xxhash.xxh3_64()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
