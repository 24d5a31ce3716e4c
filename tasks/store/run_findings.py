"""What is wrong with a run beyond its single steps: gaps, metrics, evaluations, and what checkpoints applied."""

from tasks.errors import ShardError, StoreError
from tasks.store.batch import stored_digest
from tasks.store.checkpoint_files import read_marker, wrong_files
from tasks.store.filesystem import files_of, read_text
from tasks.store.findings import Finding, named
from tasks.store.kind import done_steps
from tasks.store.layout import CHECKPOINT_MARKER, MANIFEST, RunFolder, checkpoint_key
from tasks.store.manifest import Manifest
from tasks.store.partitions import stored_steps
from tasks.store.reader import read
from tasks.store.resume import complete_checkpoints
from tasks.store.run_settings import RunSettings

_RESTORE = "restore what is missing from a copy"
_ROWS = {"batches": "batch", "metrics": "metrics"}
_A_ROW = {"batches": "a batch", "metrics": "metrics"}


def run_findings(
    folder: RunFolder, manifest: Manifest, settings: RunSettings
) -> tuple[list[Finding], list[str]]:
    """All of it, and what could not be checked.

    The last step that has a batch counts as done in a finished run alone: in another it may be in the making.
    """
    found: list[Finding] = []
    batches, metrics = stored_steps(folder, "batches"), stored_steps(folder, "metrics")
    dataset = "batches" if manifest.trains else "metrics"
    ended = done_steps(folder, manifest)
    if gaps := sorted(set(range(max(ended, default=-1) + 1)) - set(ended)):
        found.append(
            Finding(folder.dataset(dataset), f"no {_ROWS[dataset]} of steps {named(gaps)}", _RESTORE)
        )
    done = batches if manifest.status == "finished" else batches[:-1]
    if silent := sorted(set(done) - set(metrics)):
        found.append(Finding(folder.dataset("metrics"), f"no metrics of steps {named(silent)}", _RESTORE))
    notes: list[str] = []
    for version in _due_evaluations(folder, manifest, settings, len(done)):
        try:
            found += _evaluation(folder, version, 2 * settings.evaluate.n_prompts)
        except ShardError as error:
            notes.append(f"evaluation of version {version} could not be checked: {error}")
    for version in stored_steps(folder, "evaluation_scores"):
        try:
            found += _held_out_scores(folder, version)
        except ShardError as error:
            notes.append(f"held-out scores of version {version} could not be checked: {error}")
    if manifest.status == "finished" and settings.steps not in (None, len(ended)):
        what = f"it says that the run is finished with {settings.steps} steps, {len(ended)} have {_A_ROW[dataset]}"
        found.append(Finding(folder.path(MANIFEST), what, _RESTORE))
    found += _last_checkpoint(folder, manifest, settings)
    for version in complete_checkpoints(folder):
        try:
            found += _checkpoint(folder, version)
        except ShardError as error:
            notes.append(f"checkpoint of version {version} could not be checked: {error}")
    return found, notes


def _due_evaluations(folder: RunFolder, manifest: Manifest, settings: RunSettings, n_done: int) -> list[int]:
    """Versions that must be evaluated wholly: of those that are done the ones that are begun, and a finished run's last.

    One that is not begun need not have been due: `evaluate.every` and `evaluate.enabled` may change on resume. That it
    was lost is seen by the inventory. The version that the last done step made may be evaluated just now.
    """
    evaluate, is_finished = settings.evaluate, manifest.status == "finished"
    if not (evaluate.enabled and evaluate.every and evaluate.n_prompts):
        return []
    last = n_done if is_finished else n_done - 1
    begun = {each for each in stored_steps(folder, "evaluations") if manifest.first_step <= each <= last}
    return sorted(begun | ({last} if is_finished and last == settings.steps else set()))


def _evaluation(folder: RunFolder, version: int, n_expected: int) -> list[Finding]:
    ids = read(folder, "evaluations", ["trajectory_id"], version=version)["trajectory_id"]
    where, n_unique = folder.dataset("evaluations", version=version), len(ids.unique())
    found = []
    if n_unique < len(ids):
        found.append(Finding(where, f"{len(ids) - n_unique} rows are there twice", _RESTORE))
    if n_unique < n_expected:
        found.append(Finding(where, f"{n_unique} of {n_expected} held-out trajectories are there", _RESTORE))
    return found


def _held_out_scores(folder: RunFolder, version: int) -> list[Finding]:
    """Scores of held-out trajectories are of those that are there."""
    known = set(read(folder, "evaluations", ["trajectory_id"], version=version)["trajectory_id"].to_pylist())
    scores = read(folder, "evaluation_scores", ["trajectory_id"], step=version)
    if orphans := sorted(set(scores["trajectory_id"].to_pylist()) - known):
        what = f"{len(orphans)} rows of version {version} have no held-out trajectory: {named(orphans)}"
        return [Finding(folder.dataset("evaluation_scores"), what, _RESTORE)]
    return []


def _last_checkpoint(folder: RunFolder, manifest: Manifest, settings: RunSettings) -> list[Finding]:
    """A finished run has the checkpoint of the version that its last step made."""
    last = settings.steps
    if (
        manifest.status != "finished"
        or not manifest.trains
        or not last
        or last in complete_checkpoints(folder)
    ):
        return []
    what = f"the run is finished, and its last checkpoint, of version {last}, is missing or not complete"
    remedy = "restore it from a copy; without one, raise steps and go on with the run: stored batches are applied again"
    return [Finding(folder.path(checkpoint_key(last)), what, remedy)]


def _checkpoint(folder: RunFolder, version: int) -> list[Finding]:
    """A checkpoint's files are those that were written, and the batch that it applied last is the one that is stored."""
    files, place = files_of(folder), checkpoint_key(version)
    key = f"{place}/{CHECKPOINT_MARKER}"
    try:
        marker = read_marker(read_text(files, key), folder.path(key))
    except ShardError:
        raise
    except StoreError as error:
        return [
            Finding(folder.path(key), f"it {str(error).removeprefix(folder.path(key)).strip()}", _RESTORE)
        ]
    found = [
        Finding(folder.path(wrong), what, "restore it from a copy, or remove the checkpoint")
        for wrong, what in wrong_files(files, place, marker.files or {})
    ]
    told = marker.digest
    if told and version and told != (stored := stored_digest(folder, version - 1)):
        what = f"it applied batch {told[:16]}..., stored for step {version - 1} is {stored[:16]}..."
        remedy = "restore the batch from a copy, or remove the checkpoint"
        found.append(Finding(folder.path(key), what, remedy))
    return found
