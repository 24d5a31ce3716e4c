"""run.json: id, configuration, status and counters of a run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from rollmill.tasks.errors import ManifestError, StoreError
from rollmill.tasks.store.filesystem import Files, open_files, read_text
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.schemas import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class ForkOrigin:
    """A run that another run was forked from, and the step of that fork.

    Attributes:
        run: id of the original run, which the copied rows keep.
        folder: location of the original run at the time of the fork.
        step: step of the fork: rows of earlier steps are copied from the original run.
        config: resolved configuration of the original run at the fork; empty if not recorded.
    """

    run: str
    folder: str
    step: int
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingSource:
    """A run whose stored rollouts another run trains on.

    Attributes:
        run: id of the run that stored the rollouts.
        folder: absolute location of that run, as in the column `source` of the data set `batches`.
    """

    run: str
    folder: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of run.json, the file that describes a run: its ids, configuration, status and origins.

    Attributes:
        run: random id; never the folder's name.
        incarnation: counter that rises by one whenever a trainer loads state; 0: no trainer has.
        epoch: counter that rises by one whenever the folder is opened for writing, from 1; part of the name of each shard.
        schema_version: of all data sets of the run.
        config: resolved configuration, as it was when the folder was last opened for writing.
        versions: of the packages then in use, by name.
        git_commit: of the checkout then in use; empty outside of one.
        created_at: ISO 8601, UTC.
        status: "forking" until everything that a forked run begins with is copied.
        origins: the runs that it was forked from, oldest first.
        sources: the runs whose rollouts it trains on; empty for a run that samples.
        trains: False for a run of the flow collect, whose steps are done when they have metrics.
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
    origins: tuple[ForkOrigin, ...] = ()
    sources: tuple[TrainingSource, ...] = ()
    trains: bool = True

    @property
    def first_step(self) -> int:
        """First step that is not copied from another run: 0, or the step at which this run was forked."""
        return self.origins[-1].step if self.origins else 0

    def run_at_step(self, step: int) -> str:
        """Return the id of the run that wrote the rows of a step: this run, or one that it was forked from."""
        return next((origin.run for origin in self.origins if step < origin.step), self.run)


_ADAPTER = TypeAdapter(Manifest)


def has_manifest(folder: RunFolder) -> bool:
    """True if the folder has a run.json."""
    return bool(open_files(folder).keys(MANIFEST))


def read_manifest(folder: RunFolder) -> Manifest:
    """Read a run's manifest.

    Raises:
        ManifestError: it is damaged.
        StoreError: there is none, it cannot be read, or a Rollmill of another schema version wrote it.
    """
    if not has_manifest(folder):
        raise StoreError(f"{folder.location} holds no run: there is no {MANIFEST} in it")
    text = read_text(open_files(folder), MANIFEST)
    try:
        manifest = _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(
            f"{folder.path(MANIFEST)} is damaged: {place or 'the whole'}: {first['msg']}"
        ) from error
    if manifest.schema_version != SCHEMA_VERSION:
        which = "a newer" if manifest.schema_version > SCHEMA_VERSION else "an older"
        raise StoreError(
            f"{folder.path(MANIFEST)} has schema version {manifest.schema_version}, this Rollmill reads "
            f"{SCHEMA_VERSION}; use {which} one"
        )
    return manifest


def write_manifest(files: Files, manifest: Manifest, stored: Manifest | None) -> None:
    """Replace run.json atomically; called by the holder of the run's lock.

    Args:
        files: the run's files, opened by the holder of its lock.
        manifest: the new content of run.json.
        stored: the content of run.json as the caller last read or wrote it; None: there is no run.json.

    Raises:
        LeaseLostError: run.json on S3 is not `stored`: another process has taken the run over.
        StoreError: it could not be written.
    """

    def is_stored(text: bytes | None) -> bool:
        if text is None or stored is None:
            return text is None and stored is None
        try:
            return _manifest_text(_ADAPTER.validate_json(text)) == _manifest_text(stored)
        except ValidationError:
            return False

    files.exchange(MANIFEST, _manifest_text(manifest), is_stored)


def _manifest_text(manifest: Manifest) -> bytes:
    return _ADAPTER.dump_json(manifest, indent=2) + b"\n"
