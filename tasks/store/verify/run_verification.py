"""Verify a whole run: checks beyond its single steps, the list of all checks, and the loop that applies them."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from rollmill.tasks.errors import ManifestError, SchemaError, ShardError, ShardGoneError, StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import find_wrong_files, read_marker
from rollmill.tasks.store.expert_routing import select_expired_steps
from rollmill.tasks.store.folders import (
    CHECKPOINT_MARKER,
    MANIFEST,
    PARTITION_KEYS,
    POLICIES,
    RunFolder,
    checkpoint_key,
    step_from_key,
)
from rollmill.tasks.store.held_out_counts import count_held_out
from rollmill.tasks.store.logprob_rows import teacher_identity
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.run.lock import is_written_to
from rollmill.tasks.store.run.manifest import describe_misplaced
from rollmill.tasks.store.run.resume import list_complete_checkpoints
from rollmill.tasks.store.schema_versions import check_version, stored_schema
from rollmill.tasks.store.shards.integrity import open_shard
from rollmill.tasks.store.shards.inventory import (
    INVENTORY,
    ShardEvent,
    is_recorded,
    list_shard_sizes,
    read_inventory,
)
from rollmill.tasks.store.shards.shard_names import ShardName, list_superseded_shards
from rollmill.tasks.store.stored_batch import read_batch_digest
from rollmill.tasks.store.verify import step_checks
from rollmill.tasks.store.verify.run_views import RESTORE, Finding, RunView, ShardView, StepView, VersionView

_RESTORE_SHARD = "restore it from a copy of the run; without one, its rows are lost"
_PARTITION_VALUES = dict.fromkeys(("scorer", "env", "policy"), "[^/]+")
_REPLACE_LINK = "replace it with the folder or file itself"
_MOVE_OUT = "move it out of the data set, whose plain scans it breaks"


def find_misplaced(shard: ShardView) -> Iterator[Finding]:
    """Find a file below a data set that is not a shard in a partition."""
    dataset, *partition, _ = shard.key.split("/")
    keys = PARTITION_KEYS[dataset]
    if ShardName.of(shard.key) is None:
        yield Finding(shard.where, "it is not named as a shard is", _MOVE_OUT)
    elif len(partition) != len(keys) or not all(
        re.fullmatch(f"{name}={_PARTITION_VALUES.get(name, '[0-9]{6,}')}", part)
        for name, part in zip(keys, partition, strict=True)
    ):
        expected = "/".join([dataset, *(f"{name}=..." for name in keys)])
        yield Finding(shard.where, f"it is not in a partition, {expected}", _MOVE_OUT)


def find_damage(shard: ShardView) -> Iterator[Finding]:
    """Find a shard with a changed byte, another schema, or another number of rows than recorded."""
    if any(find_misplaced(shard)):
        return
    where, dataset = shard.where, shard.key.partition("/")[0]
    try:
        stored = open_shard(shard.run.files.open(shard.key), shard.key, where)
        stored.check()
        check_version(stored.schema())
        if not stored.schema().equals(stored_schema(dataset, stored.schema())):
            yield Finding(where, "its schema is not that of its data set", _MOVE_OUT)
            return
        n_rows = stored.read([0]).num_rows
    except ShardGoneError:
        # A compacted one replaced it since it was listed, or the inventory reports it.
        return
    except (ShardError, SchemaError, pa.ArrowException, OSError) as error:
        yield Finding(where, str(error).removeprefix(f"{where} is "), _RESTORE_SHARD)
        return
    note = (shard.run.inventory or {}).get(shard.key)
    if note is not None and note.event == "written" and note.rows != n_rows:
        yield Finding(where, f"it has {n_rows} rows, and was written with {note.rows}", _RESTORE_SHARD)


def find_newer_shards(run: RunView) -> Iterator[Finding]:
    """Find shards of a later epoch than that of run.json."""
    newest = max((name.epoch for key in run.keys if (name := ShardName.of(key))), default=0)
    if newest > run.manifest.epoch:
        what = f"it says epoch {run.manifest.epoch}, and there are shards of epoch {newest}"
        yield Finding(run.folder.path(MANIFEST), what, RESTORE)


def find_missing_shards(run: RunView) -> Iterator[Finding]:
    """Find recorded shards that are missing, and shards without a record.

    Raises:
        ShardError: the inventory is damaged.
    """
    before = run.inventory
    if before is None:
        raise ShardError("the inventory is damaged, and missing shards cannot be found without it")
    # In this order, since a writer may be at work: what it had stored by the listing it had recorded by the second reading, and
    # what it had recorded by the first one was there at the listing, unless its removal is recorded too. A finished run's writer
    # still stores spans until it ends.
    is_closed = run.is_finished and not is_written_to(run.folder)
    present = set(list_shard_sizes(run.files))
    notes = read_inventory(run.folder)
    unrecorded = _list_unrecorded(run, present, notes, is_closed=is_closed)
    if not notes:
        if unrecorded:
            # One finding instead of one for each shard, none of which is at fault.
            what = "there is no inventory, so that shards that are missing are seen by their rows alone"
            yield Finding(run.folder.dataset(INVENTORY), what, RESTORE)
        return
    gone = [
        key for key in before if is_recorded(before, key) and is_recorded(notes, key) and key not in present
    ]
    replaced = set(list_superseded_shards([*present, *gone]))
    for key in sorted(set(gone) - replaced - set(_list_expired(run, notes))):
        what = f"it is missing: it was written with {notes[key].rows} rows"
        yield Finding(run.folder.path(key), what, _RESTORE_SHARD)
    for key in sorted(set(unrecorded) - replaced):
        yield Finding(run.folder.path(key), "the inventory does not know it", _unknown_remedy(key))


def _list_expired(run: RunView, notes: Mapping[str, ShardEvent]) -> list[str]:
    """Keys of recorded `routing` shards that the run's settings allow to be removed."""
    routing = {key: step_from_key(key) or 0 for key in notes if key.startswith("routing/step=")}
    keep, checkpoint = run.settings.store.keep_routing_steps, max(run.checkpoints, default=0)
    done = len(list_steps(run.folder, "metrics"))
    expired = select_expired_steps(sorted({*routing.values()}), done=done, checkpoint=checkpoint, keep=keep)
    return [key for key, step in routing.items() if step in expired]


def _unknown_remedy(key: str) -> str:
    name = ShardName.of(key)
    epoch = name.epoch if name else 0
    lost = f"{INVENTORY}/epoch={epoch:06d}/{epoch:06d}-NUMBER-DIGEST.arrow, of a NUMBER above {name.number if name else 0}"
    return (
        f"keep it: the shard of the inventory that recorded it is missing, {lost}; restore that from a copy, or let the next "
        "command that writes to the run record this one again. Only if it was put there by hand, move it out of the run"
    )


def _list_unrecorded(
    run: RunView, keys: Collection[str], notes: Mapping[str, ShardEvent], *, is_closed: bool
) -> list[str]:
    """Shards that are not recorded and should be: all, but the newest of the inventory, if the run is closed."""
    names = {key: name for key in keys if (name := ShardName.of(key))}
    newest = max(
        (key for key in names if key.startswith(f"{INVENTORY}/")), key=lambda key: names[key], default=""
    )
    unnoted = [key for key in names if not is_recorded(notes, key) and key != newest]
    if is_closed:
        return unnoted
    # A writer records at each step's end, and when it is opened. So in a running run, shards older than the newest recorded
    # one should be recorded, and those up to the last batch but one of the same writer.
    last = max((name for key in notes if (name := ShardName.of(key))), default=None)
    batches: dict[int, list[int]] = {}
    for key, name in names.items():
        # Batches of earlier steps were copied by a fork, and their writers recorded nothing here.
        if key.startswith("batches/") and (step_from_key(key) or 0) >= run.manifest.first_step:
            batches.setdefault(name.epoch, []).append(name.number)
    ends = {epoch: sorted(numbers)[-2] for epoch, numbers in batches.items() if len(numbers) > 1}
    return [
        key
        for key in unnoted
        if not names[key].is_compacted
        and key not in notes
        and (
            (last is not None and (names[key].epoch, names[key].number) < (last.epoch, last.number))
            or names[key].number <= ends.get(names[key].epoch, -1)
        )
    ]


def find_broken_links(run: RunView) -> Iterator[Finding]:
    """Find symbolic links in data sets that lead nowhere, to themselves or to a folder that they are in."""
    if not run.folder.is_local:
        return
    for dataset in PARTITION_KEYS:
        top = run.folder.local / dataset
        below = (Path(where, name) for where, *names in os.walk(top) for name in chain(*names))
        for link in filter(Path.is_symlink, chain([top], below)):
            what = f"it is a link to {link.readlink()}, which leads"
            try:
                target = link.resolve(strict=True)
            # RuntimeError: it leads to itself.
            except (OSError, RuntimeError):
                yield Finding(str(link), f"{what} nowhere", _REPLACE_LINK)
                continue
            if link.parent.resolve().is_relative_to(target):
                yield Finding(str(link), f"{what} to a folder that it is in", _REPLACE_LINK)


def find_missing_steps(run: RunView) -> Iterator[Finding]:
    """Find steps before the last one without a batch or, in a run that only collects, without metrics."""
    dataset, what = ("batches", "batch") if run.manifest.trains else ("metrics", "metrics")
    if gaps := sorted(set(range(max(run.done_steps, default=-1) + 1)) - set(run.done_steps)):
        yield Finding(run.folder.dataset(dataset), f"no {what} of steps {name_first(gaps)}", RESTORE)


def find_missing_metrics(run: RunView) -> Iterator[Finding]:
    """Find trained steps without metrics, except the last step of an unfinished run."""
    # Metrics are stored after the batch: the last step may still be in training.
    batches = list_steps(run.folder, "batches")
    done = batches if run.is_finished else batches[:-1]
    if silent := sorted(set(done) - set(list_steps(run.folder, "metrics"))):
        yield Finding(run.folder.dataset("metrics"), f"no metrics of steps {name_first(silent)}", RESTORE)


def find_wrong_length(run: RunView) -> Iterator[Finding]:
    """Find a finished run with another number of steps than its settings say."""
    steps, n_done = run.settings.steps, len(run.done_steps)
    if run.is_finished and steps not in (None, n_done):
        row = "a batch" if run.manifest.trains else "metrics"
        what = f"it says that the run is finished with {steps} steps, {n_done} have {row}"
        yield Finding(run.folder.path(MANIFEST), what, RESTORE)


def find_missing_last_checkpoint(run: RunView) -> Iterator[Finding]:
    """Find a finished run without the checkpoint of its last version."""
    last = run.settings.steps
    if run.is_finished and run.manifest.trains and last and last not in run.checkpoints:
        what = f"the run is finished, and its last checkpoint, of version {last}, is missing or not complete"
        remedy = "restore it from a copy; without one, raise steps and resume the run: stored batches are applied again"
        yield Finding(run.folder.path(checkpoint_key(last)), what, remedy)


def find_misplaced_sources(run: RunView) -> Iterator[Finding]:
    """Find runs that this run was trained from and that are not in their recorded folder."""
    for source in run.manifest.sources:
        try:
            wrong = describe_misplaced(source)
        except StoreError as error:
            wrong = str(error)
        if wrong:
            yield Finding(run.folder.path(MANIFEST), wrong, "move the source back to its folder")


def find_mixed_teachers(run: RunView) -> Iterator[Finding]:
    """Find log-probabilities under one teacher's name that several models computed."""
    for policy in run.policies:
        # Those of a run's own policies have a model for each step.
        if policy in POLICIES:
            continue
        models = set(read(run.folder, "logprobs", ["model"], policy=policy)["model"].to_pylist())
        if len({teacher_identity(each) for each in models}) > 1:
            what = f"it has rows of different models: {name_first(sorted(models))}"
            remedy = "move it out of the run, and store them again with `rollmill annotate`"
            yield Finding(run.folder.dataset("logprobs", policy=policy), what, remedy)


def find_incomplete_evaluation(version: VersionView) -> Iterator[Finding]:
    """Find repeated or missing held-out trajectories of an evaluation that was begun, or of a finished run's last version."""
    if version.version not in version.run.due_evaluations:
        return
    ids = version.read_held_out_ids()
    where, n_unique = version.run.folder.dataset("evaluations", version=version.version), len(set(ids))
    if n_unique < len(ids):
        yield Finding(where, f"{len(ids) - n_unique} rows are there twice", RESTORE)
    n_expected = sum(count_held_out(version.run.manifest.config).values())
    # Tables leave out an evaluation of another number of rows.
    if n_unique != n_expected:
        yield Finding(where, f"{n_unique} of {n_expected} held-out trajectories are there", RESTORE)


def find_held_out_scores_without_trajectory(version: VersionView) -> Iterator[Finding]:
    """Find scores of held-out trajectories that are not stored."""
    scores = read(version.run.folder, "evaluation_scores", ["trajectory_id"], step=version.version)
    scored = set(scores["trajectory_id"].to_pylist())
    if scored and (missing := sorted(scored - set(version.read_held_out_ids()))):
        what = f"{len(missing)} rows of version {version.version} have no held-out trajectory: {name_first(missing)}"
        yield Finding(version.run.folder.dataset("evaluation_scores"), what, RESTORE)


def find_wrong_checkpoint(version: VersionView) -> Iterator[Finding]:
    """Find a checkpoint with a changed or missing file, or one that applied another batch than is stored."""
    if version.version not in version.run.checkpoints:
        return
    found = list(_compare_checkpoint(version))
    # A process that trains removes old checkpoints meanwhile, their markers first.
    if found and version.version in list_complete_checkpoints(version.run.folder):
        yield from found


def _compare_checkpoint(version: VersionView) -> Iterator[Finding]:
    folder, place = version.run.folder, checkpoint_key(version.version)
    marker_path = folder.path(f"{place}/{CHECKPOINT_MARKER}")
    try:
        marker = read_marker(folder, version.version)
    except ShardError:
        # It cannot be read, which says nothing about its content.
        raise
    except StoreError as error:
        yield Finding(marker_path, f"it {str(error).removeprefix(marker_path).strip()}", RESTORE)
        return
    for name, stored_as, expected in (
        ("run", marker.run, version.run.manifest.run),
        ("version", marker.version, version.version),
    ):
        if stored_as != expected:
            yield Finding(marker_path, f"its {name} is {stored_as!r}, expected {expected!r}", RESTORE)
    for wrong, what in find_wrong_files(version.run.files, place, marker.files or {}):
        yield Finding(folder.path(wrong), what, "restore it from a copy, or remove the checkpoint")
    if not (marker.digest and version.version):
        return
    if marker.digest != (stored := read_batch_digest(folder, version.version - 1)):
        what = f"it applied batch {marker.digest[:16]}..., stored for step {version.version - 1} is {stored[:16]}..."
        yield Finding(marker_path, what, "restore the batch from a copy, or remove the checkpoint")


View = TypeVar("View")
Check: TypeAlias = Callable[[View], Iterable[Finding]]
# Called with the number of shards and steps that are done, and of all.
ReportProgress = Callable[[int, int], None]

# Every check, by what it reads; docs/reference/integrity.md lists them with their docstrings. Each yields findings, and raises
# ShardError if it cannot read what it needs.
SHARD_CHECKS: Sequence[Check[ShardView]] = (find_misplaced, find_damage)
RUN_CHECKS: Sequence[Check[RunView]] = (
    find_newer_shards,
    find_missing_shards,
    find_broken_links,
    find_missing_steps,
    find_missing_metrics,
    find_wrong_length,
    find_missing_last_checkpoint,
    find_misplaced_sources,
    find_mixed_teachers,
)
VERSION_CHECKS: Sequence[Check[VersionView]] = (
    find_incomplete_evaluation,
    find_held_out_scores_without_trajectory,
    find_wrong_checkpoint,
)
STEP_CHECKS: Sequence[Check[StepView]] = (
    step_checks.find_repeated_rows,
    step_checks.find_wrong_order,
    step_checks.find_wrong_problems,
    step_checks.find_wrong_replays,
    step_checks.find_rows_of_other_runs,
    step_checks.find_rows_without_rollout,
    step_checks.find_unplanned_and_missing_rollouts,
    step_checks.find_missing_groups,
    step_checks.find_missing_scores,
    step_checks.find_stale_rows,
    step_checks.find_missing_sources,
    step_checks.find_wrong_rollout_values,
    step_checks.find_wrong_token_values,
)


@dataclass(slots=True)
class VerificationReport:
    """The result of verifying a run.

    Attributes:
        findings: all faults.
        notes: remarks that are no faults, such as steps that are not done yet.
        shards, steps: how many were verified.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shards: int = 0
    steps: int = 0

    def apply(self, checks: Sequence[Check[View]], view: View, name: str) -> None:
        """Run checks on a view (a part of the run) and add their findings; `name` is what notes call that part."""
        for check in checks:
            try:
                for finding in check(view):
                    # At once, since a later row may be unreadable.
                    self.findings.append(finding)
            except ShardError as error:
                # No finding: the damaged shard is one already, and many checks read it.
                note = f"{name} could not be fully checked: {error}"
                self.notes += [note] if note not in self.notes else []


def verify_run(
    folder: RunFolder,
    advance: ReportProgress = lambda done, total: None,
    *,
    more: Sequence[Check[RunView]] = (),
) -> VerificationReport:
    """Verify everything that is stored of a run, which may be running; memory is bounded by one step.

    `more` are checks of the whole run by those who know what its rows mean.

    Raises:
        StoreError: it could not be verified: there is no run, or its storage does not answer.
    """
    try:
        run = RunView.open(folder)
    except ManifestError as error:
        where = folder.path(MANIFEST)
        wrong = Finding(where, str(error).removeprefix(f"{where} is "), RESTORE)
        return VerificationReport([wrong], ["nothing else was checked: run.json says what is to be there"])
    report = VerificationReport(shards=len(run.keys), steps=len(run.steps))
    total = report.shards + report.steps
    for number, key in enumerate(run.keys, 1):
        report.apply(SHARD_CHECKS, ShardView(run, key), key)
        advance(number, total)
    report.apply([*RUN_CHECKS, *more], run, "the run")
    for version in run.versions:
        report.apply(VERSION_CHECKS, VersionView(run, version), f"version {version}")
    lacks = "has no batch yet" if run.manifest.trains else "is not all collected yet"
    for number, step in enumerate(run.steps, report.shards + 1):
        # A view keeps the rows that it has read: a new one for each step bounds the memory by one step.
        view = StepView(run, step)
        view.read_in_order()
        report.apply(STEP_CHECKS, view, f"step {step}")
        report.notes += [] if view.is_done else [f"step {step} is not done: it {lacks}"]
        advance(number, total)
    return report
