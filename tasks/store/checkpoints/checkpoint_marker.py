"""COMPLETE.json, which makes a checkpoint complete: what the version is, and size and XXH3-64 of each of its files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmill.tasks.config import describe_invalid
from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.store.filesystem import Files, open_files, read_text
from rollmill.tasks.store.folders import CHECKPOINT_MARKER, RunFolder, checkpoint_key

# Name of the marker's hash of its other content, XXH3-64 of its JSON with sorted names.
_HASH = "content_xxh3_64"

# Files are hashed in pieces of this size (16 MiB), which bounds the memory.
CHUNK_BYTES = 1 << 24


class StoredFile(BaseModel):
    """Size in bytes of one file of a checkpoint, and the XXH3-64 hash of its content, 16 hex digits."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bytes: Annotated[int, Field(ge=0)]
    xxh3_64: str


class CheckpointMarker(BaseModel):
    """Content of COMPLETE.json, which makes a checkpoint complete: what it contains, and its files.

    Attributes:
        format: number of the format of the checkpoint's files; 1 in old checkpoints, which do not record it.
        run: random id of the run.
        version: policy version; batches 0 to version - 1 are applied.
        digest: digest of the last batch applied; empty if there is none.
        n_updates: optimizer updates so far.
        result: what the last training step returned, as JSON values; None if there is none.
        ranks: ranks that wrote it; 0 if not recorded.
        zero_stage: ZeRO stage they trained with; -1 if not recorded.
        dtype: type of the trained weights; empty if not recorded.
        files: the other files by path below the checkpoint; None if not recorded.
    """

    # A metric of `result` may be NaN, which pydantic would write as null. A fork copies what it does not know.
    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="constants")

    format: int = 1
    run: str = ""
    version: int = -1
    digest: str = ""
    n_updates: int = 0
    result: dict[str, Any] | None = None
    ranks: int = 0
    zero_stage: int = -1
    dtype: str = ""
    files: dict[str, StoredFile] | None = None

    def to_bytes(self) -> bytes:
        """Encode the marker as JSON text with the hash of its content; fields that were never set are left out."""
        content: dict[str, Any] = json.loads(self.model_dump_json(exclude_unset=True))
        return json.dumps(content | {_HASH: _hash_content(content)}, indent=2).encode()


def _hash_content(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def parse_marker(text: bytes, where: str) -> CheckpointMarker:
    """Parse COMPLETE.json; raises StoreError, which names the file `where` and the damaged field.

    The markers of old checkpoints have no hash of their content.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is damaged: it is no JSON: {error}") from error
    if isinstance(content, dict) and _HASH in content and content.pop(_HASH) != _hash_content(content):
        raise StoreError(f"{where} is damaged: its content is not what was written")
    try:
        marker = CheckpointMarker.model_validate(content)
    except ValidationError as error:
        raise StoreError(f"{where} is damaged: {describe_invalid(error)}") from error
    if marker.format > 1 and (missing := {"run", "version", "n_updates", "files"} - marker.model_fields_set):
        raise StoreError(f"{where} is damaged: {min(missing)} is missing")
    return marker


def read_marker(folder: RunFolder, version: int) -> CheckpointMarker:
    """Read COMPLETE.json of a stored checkpoint of a run.

    Raises:
        ShardError: the file cannot be read.
        StoreError: the file is damaged.
    """
    key = f"{checkpoint_key(version)}/{CHECKPOINT_MARKER}"
    return parse_marker(read_text(open_files(folder), key), folder.path(key))


def read_local_marker(checkpoint: Path) -> CheckpointMarker:
    """Read COMPLETE.json of a checkpoint's folder on this machine; raises StoreError if it is missing or damaged."""
    path = checkpoint / CHECKPOINT_MARKER
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"checkpoint {checkpoint} is not complete: {error}") from error
    return parse_marker(text, str(path))


def describe_file(path: Path) -> StoredFile:
    """Compute the size and the hash of a file on this machine."""
    with pa.OSFile(str(path)) as source:
        return StoredFile(bytes=path.stat().st_size, xxh3_64=_hash_file(source))


def check_files(folder: Path, listed: Mapping[str, StoredFile], *, reads_bytes: bool = True) -> None:
    """Raise StoreError, which names the file, if a file of a checkpoint on this machine is not as listed; see `find_wrong_files`."""
    for name, what in find_wrong_files(open_files(RunFolder(folder)), "", listed, reads_bytes=reads_bytes):
        raise StoreError(
            f"checkpoint {folder} is damaged: {folder / name}: {what}; restore it from a copy, or use another version"
        )


def find_wrong_files(
    files: Files, folder: str, listed: Mapping[str, StoredFile], *, reads_bytes: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) for each file of a stored checkpoint that differs from its record.

    `folder` is the key of the checkpoint ("": the files are at the root); its marker lists the files `listed`. Only sizes
    are compared without `reads_bytes`.
    """
    start = f"{folder}/" if folder else ""
    sizes = files.sizes(f"{start}**/*")
    for name, recorded in listed.items():
        key = start + name
        if key not in sizes:
            yield key, f"it is missing: it was written with {recorded.bytes} bytes"
        elif sizes[key] != recorded.bytes:
            yield key, f"it has {sizes[key]} bytes, and was written with {recorded.bytes}"
        elif reads_bytes:
            try:
                with files.open(key) as source:
                    if _hash_file(source) != recorded.xxh3_64:
                        yield key, "its bytes are not those that were written"
            except (ShardError, OSError) as error:
                yield key, str(error)


def _hash_file(source: pa.NativeFile) -> str:
    digest = xxhash.xxh3_64()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
