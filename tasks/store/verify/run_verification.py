"""Verify a whole run: the list of all checks, and the loop that applies them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from rollmill.tasks.errors import ManifestError, ShardError
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.verify import run_checks, step_checks
from rollmill.tasks.store.verify.findings import RESTORE, Finding
from rollmill.tasks.store.verify.run_views import RunView, ShardView, StepView, VersionView

View = TypeVar("View")
Check: TypeAlias = Callable[[View], Iterable[Finding]]
# Called with the number of shards and steps that are done, and of all.
ReportProgress = Callable[[int, int], None]

# Every check, by what it reads; docs/integrity.md lists them with their docstrings. Each yields findings, and raises
# ShardError if it cannot read what it needs.
SHARD_CHECKS: Sequence[Check[ShardView]] = (run_checks.find_misplaced, run_checks.find_damage)
RUN_CHECKS: Sequence[Check[RunView]] = (
    run_checks.find_newer_shards,
    run_checks.find_missing_shards,
    run_checks.find_missing_steps,
    run_checks.find_missing_metrics,
    run_checks.find_wrong_length,
    run_checks.find_missing_last_checkpoint,
    run_checks.find_misplaced_sources,
)
VERSION_CHECKS: Sequence[Check[VersionView]] = (
    run_checks.find_incomplete_evaluation,
    run_checks.find_held_out_scores_without_trajectory,
    run_checks.find_wrong_checkpoint,
)
STEP_CHECKS: Sequence[Check[StepView]] = (
    step_checks.find_repeated_rows,
    step_checks.find_wrong_order,
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


def verify_run(folder: RunFolder, advance: ReportProgress = lambda done, total: None) -> VerificationReport:
    """Verify everything that is stored of a run, which may be running; memory is bounded by one step.

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
    report.apply(RUN_CHECKS, run, "the run")
    for version in run.versions:
        report.apply(VERSION_CHECKS, VersionView(run, version), f"version {version}")
    lacks = "has no batch yet" if run.manifest.trains else "is not all collected yet"
    for number, step in enumerate(run.steps, report.shards + 1):
        # A view keeps the rows that it has read: a new one for each step bounds the memory by one step.
        view = StepView(run, step)
        report.apply(STEP_CHECKS, view, f"step {step}")
        report.notes += [] if view.is_done else [f"step {step} is not done: it {lacks}"]
        advance(number, total)
    return report
