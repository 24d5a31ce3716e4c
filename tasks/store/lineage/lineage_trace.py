"""Follow a policy's lineage to every trajectory that it was trained on, and check each byte on the way."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import find_wrong_files
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import Partition, RunFolder, partition_folder
from rollmill.tasks.store.lineage.policy_lineage import (
    CARD,
    LINEAGE,
    Lineage,
    StepRecord,
    read_lineage,
)
from rollmill.tasks.store.lineage.teacher_rows import find_teacher, read_teacher
from rollmill.tasks.store.lineage.trained_rows import TrainedRow, combine_digests, read_trained_rows
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.manifest import TrainingSource, describe_misplaced, read_manifest
from rollmill.tasks.store.stored_batch import batch_digest
from rollmill.tasks.store.verify.run_verification import find_damage
from rollmill.tasks.store.verify.run_views import RESTORE, Finding, RunView, ShardView

_EXPORT = "export the policy again, or restore the file from a copy"


@dataclass(frozen=True, slots=True)
class TracedPolicy:
    """A policy on the way: its folder, its digest (SHA-256), the run and version that it is, and its teachers: NAME (MODEL)."""

    location: str
    digest: str
    run: str
    folder: str
    version: int
    teachers: tuple[str, ...] = ()


@dataclass(slots=True)
class LineageReport:
    """What a policy was made of, and what is wrong with it.

    Attributes:
        policies: the policy; then the one that its training began with, and so on.
        rows: every trajectory that they were trained on, in this order, by step and place in the batch.
        findings: all faults.
    """

    policies: list[TracedPolicy] = field(default_factory=list)
    rows: list[TrainedRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def trace_policy(policy: RunFolder) -> LineageReport:
    """List the trajectories that made an exported policy, and check its files, batches, rollouts and scores.

    A start model that is an exported policy is followed too. Memory is bounded by one step and the list of rows.
    """
    trace, digest = _Trace(), ""
    while True:
        try:
            lineage = read_lineage(policy)
        except StoreError as error:
            where = policy.path(LINEAGE)
            trace.add(where, str(error).removeprefix(f"{where} is "), _EXPORT)
            return trace.report
        if digest and lineage.digest != digest:
            what = f"it is policy {lineage.digest[:16]}..., training began with {digest[:16]}..."
            trace.add(policy.path(LINEAGE), what)
        trace.follow(policy, lineage)
        start = lineage.start_model
        if not start.lineage:
            for key, what in find_wrong_files(open_files(RunFolder(start.folder)), "", start.files):
                trace.add(f"{start.folder}/{key}", what, "restore the start model from a copy")
            return trace.report
        policy, digest = RunFolder(start.folder), start.lineage


def find_wrong_policy_files(policy: RunFolder, lineage: Lineage) -> Iterator[Finding]:
    """Find files of an exported policy that differ from its lineage.json, are missing, or were added.

    README.md, which people edit, and hidden files are not checked.
    """
    files = open_files(policy)
    for key, what in find_wrong_files(files, "", lineage.files):
        yield Finding(policy.path(key), what, _EXPORT)
    for key in files.sizes("**/*"):
        is_hidden = any(part.startswith(".") for part in key.split("/"))
        if not is_hidden and key not in lineage.files and key not in (LINEAGE, CARD):
            yield Finding(policy.path(key), f"it is not in {LINEAGE}", "remove it, if nobody needs it there")


def locate_run(policy: RunFolder, lineage: Lineage) -> RunFolder:
    """Return the run that trained a policy: the one whose folder the policy is in, else the recorded one."""
    inside = RunFolder(policy.absolute.removesuffix(f"/policies/version={lineage.version:06d}"))
    if inside.location != policy.absolute and not _find_misplaced(inside, lineage.run):
        return inside
    return RunFolder(lineage.folder)


def _find_misplaced(run: RunFolder, expected: str) -> Finding | None:
    try:
        wrong = describe_misplaced(TrainingSource(expected, run.location))
    except StoreError as error:
        wrong = str(error)
    return Finding(run.location, wrong, "bring the run back to its folder") if wrong else None


class _Trace:
    """Adds policies, rows and faults to a report; a shard that several steps have rows of is checked once."""

    def __init__(self) -> None:
        self.report = LineageReport()
        self._views: dict[str, RunView] = {}
        self._checked: set[str] = set()

    def add(self, where: str, what: str, remedy: str = RESTORE) -> None:
        """Add a fault."""
        self.report.findings.append(Finding(where, what, remedy))

    def follow(self, policy: RunFolder, lineage: Lineage) -> None:
        """Add a policy, its wrong files, and the rows and faults of each step of the run that trained it."""
        run = locate_run(policy, lineage)
        self.report.policies.append(
            TracedPolicy(
                policy.location,
                lineage.digest,
                lineage.run,
                run.location,
                lineage.version,
                lineage.teachers,
            )
        )
        self.report.findings += find_wrong_policy_files(policy, lineage)
        if wrong := _find_misplaced(run, lineage.run):
            self.report.findings.append(wrong)
            return
        manifest = read_manifest(run)
        for record in lineage.steps:
            # A lineage.json of an older Rollmill has no teachers.
            teacher = record.teacher.name if record.teacher else find_teacher(manifest, record.step)
            self._follow_step(run, record, teacher)

    def _follow_step(self, run: RunFolder, record: StepRecord, teacher: str) -> None:
        where = run.dataset("batches", step=record.step)
        try:
            self._check_shards(run, "batches", {"step": record.step})
            batch = read(run, "batches", step=record.step)
            for source, step, scorer in dict.fromkeys(
                tuple(each.values()) for each in batch.select(["source", "source_step", "scorer"]).to_pylist()
            ):
                folder = RunFolder(source) if source else run
                self._check_shards(folder, "rollouts", {"step": step})
                self._check_shards(folder, "scores", {"scorer": scorer, "step": step})
                if teacher:
                    self._check_shards(folder, "logprobs", {"policy": teacher, "step": step})
            rows = read_trained_rows(run, batch)
            self.report.rows += rows
            taught = read_teacher(run, batch, teacher) if teacher else None
        except StoreError as error:
            # Damage of a shard is a finding already.
            if not any(each.where in str(error) for each in self.report.findings):
                self.add(where, str(error))
            return
        if record.error:
            self.add(where, f"it could not be read at the export: {record.error}", _EXPORT)
        elif (found := batch_digest(batch)) != record.batch:
            self.add(where, f"it is batch {found[:16]}..., the policy was trained on {record.batch[:16]}...")
        elif combine_digests(rows) != record.rows:
            self.add(where, "rollouts or scores of its rows are not those that the policy was trained on")
        elif record.teacher and taught != record.teacher:
            self.add(
                where,
                f"the log-probabilities by {record.teacher.name} are not those that the policy was trained on",
            )

    def _check_shards(self, run: RunFolder, dataset: str, partition: Partition) -> None:
        """Check every byte of the shards of a partition; StoreError if there is no such run."""
        if run.location not in self._views:
            self._views[run.location] = RunView.open(run)
        view, start = self._views[run.location], f"{partition_folder(dataset, partition)}/"
        for key in view.keys:
            where = run.path(key)
            if key.startswith(start) and where not in self._checked:
                self._checked.add(where)
                self.report.findings += find_damage(ShardView(view, key))
