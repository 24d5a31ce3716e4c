"""run.json: what a run is, and how often it was opened."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from tasks.errors import ManifestError, StoreError
from tasks.store.filesystem import Files, files_of, read_text
from tasks.store.layout import MANIFEST, RunFolder
from tasks.store.schemas import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Origin:
    """A run that another was forked from.

    Attributes:
        run: its id, which is that of the rows that were brought over.
        folder: where it lay.
        step: rows of the steps before this one are its, or those of its own origins.
        config: resolved configuration that it had; empty when a fork did not note it.
    """

    run: str
    folder: str
    step: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """A run whose rollouts another trains on.

    Attributes:
        run: its id.
        folder: its location, from any working folder; rows of `batches` name it by that.
    """

    run: str
    folder: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What run.json says.

    Attributes:
        run: random id; never the folder's name.
        incarnation: rises whenever a trainer loads state; 0: none has.
        epoch: rises whenever the folder is opened for writing, from 1; shards carry their writer's.
        schema_version: of all data sets of the run.
        config: resolved configuration, as it was when the folder was last opened for writing.
        versions: of the packages then in use, by name.
        git_commit: of the checkout then in use; empty outside of one.
        created_at: ISO 8601, UTC.
        status: forking until all that a forked run begins with has been brought over.
        origins: the runs that it was forked from, the first of them first; empty unless it was.
        sources: the runs that it trains from, or that the run it was forked from did; empty for one that samples.
        trains: False for a run of the flow collect, which has no batches: its steps are done when they have metrics.
    """

    run: str
    incarnation: int
    epoch: int
    schema_version: int
    config: dict[str, Any]
    versions: dict[str, str]
    git_commit: str
    created_at: str
    status: Literal["forking", "running", "finished"]
    origins: tuple[Origin, ...] = ()
    sources: tuple[Source, ...] = ()
    trains: bool = True

    @property
    def first_step(self) -> int:
        """The first step of its own: 0, or the one that it was forked at."""
        return self.origins[-1].step if self.origins else 0

    def run_of(self, step: int) -> str:
        """The id that rows of a step have."""
        return next((origin.run for origin in self.origins if step < origin.step), self.run)


_MANIFEST = TypeAdapter(Manifest)


def has_manifest(folder: RunFolder) -> bool:
    """True when the folder holds a run."""
    return bool(files_of(folder).keys(MANIFEST))


def read_manifest(folder: RunFolder) -> Manifest:
    """Read a run's manifest.

    Raises:
        ManifestError: it is damaged.
        StoreError: there is none, it cannot be read, or a newer Rollmill wrote it.
    """
    if not has_manifest(folder):
        raise StoreError(f"{folder.location} holds no run: there is no {MANIFEST} in it")
    text = read_text(files_of(folder), MANIFEST)
    try:
        manifest = _MANIFEST.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(
            f"{folder.path(MANIFEST)} is damaged: {place or 'the whole'}: {first['msg']}"
        ) from error
    if manifest.schema_version > SCHEMA_VERSION:
        raise StoreError(
            f"{folder.path(MANIFEST)} has schema version {manifest.schema_version}, this Rollmill reads up to "
            f"{SCHEMA_VERSION}; use a newer one"
        )
    return manifest


def write_manifest(files: Files, manifest: Manifest, stored: Manifest | None) -> None:
    """Replace a run's manifest, whole or not at all, by whoever holds the run's lock.

    Args:
        files: of the lock's holder.
        manifest: what run.json is to say.
        stored: what it says, as its holder last read or wrote it; None: there is none.

    Raises:
        LeaseLostError: on S3, it says something else by now: another process has taken the run over.
        StoreError: it could not be written.
    """

    def is_stored(text: bytes | None) -> bool:
        if text is None or stored is None:
            return text is None and stored is None
        try:
            return _text(_MANIFEST.validate_json(text)) == _text(stored)
        except ValidationError:
            return False

    files.exchange(MANIFEST, _text(manifest), is_stored)


def _text(manifest: Manifest) -> bytes:
    return _MANIFEST.dump_json(manifest, indent=2) + b"\n"
