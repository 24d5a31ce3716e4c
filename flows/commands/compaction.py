"""What `rollmill compact` does: a run that nobody writes to is compacted."""

from collections.abc import Callable

from tasks.errors import StoreError
from tasks.store.compactor import Compactor
from tasks.store.config import StoreConfig
from tasks.store.filesystem import files_of
from tasks.store.layout import PARTITION_KEYS, RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.resume import complete_checkpoints
from tasks.store.run import OpenRun


async def compact_run(folder: RunFolder, grace_s: float | None, say: Callable[[str], None]) -> str:
    """Compact a finished run, or the checkpointed steps of a stopped one, and remove what that supersedes.

    Args:
        folder: of the run, whose settings `store.compaction_...` hold.
        grace_s: seconds that superseded shards stay; None: the run's setting.
        say: tells people something.

    Returns:
        What was done, in words.

    Raises:
        RunLockedError: a process writes to the run.
        StoreError: a partition could not be compacted, which was told by `say`.
    """
    manifest, before = read_manifest(folder), _n_shards(folder)
    stored = StoreConfig.model_validate(manifest.config.get("store", {}))
    grace = stored.compaction_grace_s if grace_s is None else grace_s
    given = {"compact": True, "compaction_grace_s": grace, "remove_superseded": "after_grace"}
    config = stored.model_copy(update=given)
    with OpenRun.extend(folder, config_of=config) as run:
        async with run.writer, Compactor(run.files, run.writer, config, say) as compactor:
            if manifest.status == "finished":
                await compactor.finish()
            else:
                compactor.begin(max(complete_checkpoints(folder), default=0))
                await compactor.settled()
    if compactor.n_failed:
        raise StoreError(f"{folder.location}: {compactor.n_failed} partitions were not compacted")
    done = f"{folder.location}: {before} shards before, {_n_shards(folder)} now"
    return (
        done if manifest.status == "finished" else f"{done}; steps after the last checkpoint stay as they are"
    )


def _n_shards(folder: RunFolder) -> int:
    files = files_of(folder)
    return sum(len(files.keys(f"{name}/**/*.arrow")) for name in PARTITION_KEYS)
