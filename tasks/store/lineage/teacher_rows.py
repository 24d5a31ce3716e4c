"""The stored log-probabilities by a teacher that a step was trained on, and a digest of them."""

import hashlib

import pyarrow as pa

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.policy_lineage import TeacherRecord
from rollmill.tasks.store.lineage.trained_rows import read_matching, split_lists
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.manifest import Manifest

_COLUMNS = ("trajectory_id", "model", "logprobs")


def find_teacher(manifest: Manifest, step: int) -> str:
    """Return the name under which the log-probabilities are stored that a step was trained on; empty if there is no such teacher.

    A run keeps its teacher; a fork may have another one than the run that it was forked from.
    """
    copied = (each.config for each in manifest.origins if step < each.step and each.config)
    config = next(copied, manifest.config)
    is_stored = get_setting(config, "train.kl.reference", "none") == "stored"
    return str(get_setting(config, "train.kl.teacher", "")) if is_stored else ""


def read_teacher(run: RunFolder, batch: pa.Table, teacher: str) -> TeacherRecord:
    """Read a teacher's log-probabilities of the rows of a batch, in the batch's order, from the runs that sampled them.

    Raises:
        ShardError: one is missing or damaged; names it.
    """
    rows = batch.sort_by("order").select(["source", "source_step", "trajectory_id"]).to_pylist()
    by_origin: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        by_origin.setdefault((row["source"], row["source_step"]), []).append(row["trajectory_id"])
    models: set[str] = set()
    digests: dict[str, bytes] = {}
    for (source, step), ids in by_origin.items():
        folder = RunFolder(source) if source else run
        found = read_matching(folder, "logprobs", ids, _COLUMNS, policy=teacher, step=step)
        models.update(found["model"].to_pylist())
        for trajectory, values in zip(ids, split_lists(found["logprobs"], "<f4"), strict=True):
            digests[trajectory] = hashlib.sha256(trajectory.encode() + values).digest()
    combined = hashlib.sha256(b"".join(digests[row["trajectory_id"]] for row in rows))
    return TeacherRecord(name=teacher, models=tuple(sorted(models)), logprobs=combined.hexdigest())
