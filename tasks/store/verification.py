"""A whole run verified: its files, then its rows, step by step, so that memory is bounded by a step."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from tasks.errors import ManifestError, ShardError, StoreError
from tasks.store.filesystem import files_of
from tasks.store.findings import Finding, named
from tasks.store.inventory import DATASET, Note, all_files, all_shards, read_notes
from tasks.store.layout import MANIFEST, PARTITION_KEYS, POLICIES, RunFolder
from tasks.store.manifest import Manifest, read_manifest
from tasks.store.names import ShardName
from tasks.store.partitions import stored_scorers, stored_steps
from tasks.store.plan import group_numbers, read_plan
from tasks.store.reader import read
from tasks.store.resume import complete_checkpoints
from tasks.store.routing import expired_steps
from tasks.store.run_findings import run_findings
from tasks.store.run_settings import RunSettings, settings_by_run
from tasks.store.shard_findings import due_notes, inventory_findings, name_finding, shard_finding
from tasks.store.sources import misplaced
from tasks.store.step_findings import Expected, StepRows, step_findings
from tasks.store.token_findings import token_findings
from tasks.store.value_findings import COLUMNS, value_findings

_ROLLOUT = ["run", "group", "sample", "attempt", "status", "policy_version_first"]
_RESTORE = "restore what is missing from a copy"
Advance = Callable[[int, int], None]
"""Told (done, of how many) shards and steps."""


@dataclass(slots=True)
class Verified:
    """What was found.

    Attributes:
        findings: all that is wrong.
        notes: what is to be known and is not wrong: steps that are not done yet, for example.
        shards, steps: how many were checked.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shards: int = 0
    steps: int = 0


def verify_run(folder: RunFolder, advance: Advance = lambda done, total: None) -> Verified:
    """Check everything that is stored of a run; it may be going on meanwhile.

    Raises:
        StoreError: it could not be checked: there is no run, or what holds it does not answer.
    """
    try:
        manifest = read_manifest(folder)
        settings = settings_by_run(folder, manifest)
    except ManifestError as error:
        where = folder.path(MANIFEST)
        wrong = Finding(where, str(error).removeprefix(f"{where} is "), _RESTORE)
        return Verified([wrong], ["nothing else was checked: run.json says what is to be there"])
    return _Verification(folder, manifest, settings, advance).verified()


class _Verification:
    def __init__(
        self, folder: RunFolder, manifest: Manifest, settings: Mapping[str, RunSettings], advance: Advance
    ) -> None:
        self._folder, self._manifest, self._advance = folder, manifest, advance
        self._files, self._found = files_of(folder), Verified()
        self._settings_of_runs = settings
        self._settings = settings[manifest.run]
        self._scorers: dict[str, str] = {}  # NAME@VERSION of each run that rows are of, by its id

    def verified(self) -> Verified:
        keys = list(all_files(self._files))
        steps = stored_steps(self._folder, "rollouts")
        steps = sorted({*steps, *stored_steps(self._folder, "batches"), *stored_steps(self._folder, "plans")})
        total = len(keys) + len(steps)
        self._check_shards(keys, total)
        for number, step in enumerate(steps, len(keys) + 1):
            self._check_step(step)
            self._advance(number, total)
        self._found.steps = len(steps)
        found, notes = run_findings(self._folder, self._manifest, self._settings)
        self._found.findings += found
        self._found.findings += self._misplaced()
        self._found.notes += notes
        return self._found

    def _check_shards(self, keys: list[str], total: int) -> None:
        notes = self._inventory()
        for number, key in enumerate(keys, 1):
            wrong = name_finding(self._folder, key)
            wrong = wrong or shard_finding(self._folder, self._files, key, (notes or {}).get(key))
            self._found.findings += [wrong] if wrong else []
            self._advance(number, total)
        self._found.shards = len(keys)
        names = [name for key in keys if (name := ShardName.of(key))]
        if unchecked := sum(not name.digest for name in names):
            what = f"{unchecked} shards are of schema version 1, which has no hashes: their bytes were not checked"
            self._found.notes.append(what)
        newest = max((name.epoch for name in names), default=0)
        if newest > self._manifest.epoch:
            what = f"it says epoch {self._manifest.epoch}, and there are shards of epoch {newest}"
            self._found.findings.append(Finding(self._folder.path(MANIFEST), what, _RESTORE))
        if notes is not None:
            self._check_inventory(notes)

    def _check_inventory(self, notes: Mapping[str, Note]) -> None:
        is_finished, now = self._manifest.status == "finished", list(all_shards(self._files))
        first_step = self._manifest.first_step
        due = due_notes(now, notes, is_finished=is_finished, first_step=first_step)
        if not notes and self._manifest.schema_version > 1 and due:
            what = "there is no inventory, so that shards that are missing are seen by their rows alone"
            self._found.findings.append(Finding(self._folder.dataset(DATASET), what, _RESTORE))
        if notes:
            self._found.findings += inventory_findings(
                self._folder,
                now,
                notes,
                is_finished=is_finished,
                first_step=first_step,
                expired=self._expired(notes),
            )

    def _inventory(self) -> Mapping[str, Note] | None:
        try:
            return read_notes(self._folder)
        except ShardError:
            self._found.notes.append("the inventory is damaged: shards that are missing cannot be told by it")
            return None

    def _expired(self, notes: Mapping[str, Note]) -> list[str]:
        """Routed experts that the run need not keep."""
        routing = {key: int(key.split("=")[1][:6]) for key in notes if key.startswith("routing/step=")}
        keep = self._settings.store.keep_routing_steps
        done = len(stored_steps(self._folder, "metrics"))
        checkpoint = max(complete_checkpoints(self._folder), default=0)
        gone = expired_steps(sorted({*routing.values()}), done=done, checkpoint=checkpoint, keep=keep)
        return [key for key, step in routing.items() if step in gone]

    def _expected(self, step: int) -> Expected:
        """By the settings and the scorer of the run that the step's rows are of."""
        run = self._manifest.run_of(step)
        if run not in self._scorers:
            self._scorers[run] = self._scorer(run)
        settings = self._settings_of_runs[run]
        return Expected(
            run=run,
            group_size=settings.rollout.group_size,
            max_staleness=settings.rollout.max_staleness,
            scorer=self._scorers[run],
            leaves_short_groups_unscored=settings.score.needs_whole_group,
            is_collected=self._is_collected(step),
        )

    def _is_collected(self, step: int) -> bool:
        """True for a step of a run that does not train, once it is done."""
        return not self._manifest.trains and step in stored_steps(self._folder, "metrics")

    def _scorer(self, run: str) -> str:
        """A run's, by the first of its batches that says it; else the only one there is."""
        for step in stored_steps(self._folder, "batches"):
            if self._manifest.run_of(step) != run:
                continue
            try:
                told = read(self._folder, "batches", ["scorer", "source"], step=step).to_pylist()
            except ShardError:
                continue
            if own := [row["scorer"] for row in told if row["scorer"] and not row["source"]]:
                return str(own[0])
        scorers = stored_scorers(self._folder)
        return scorers[0] if len(scorers) == 1 else ""

    def _check_step(self, step: int) -> None:
        try:
            rows = self._step_rows(step)
            self._found.findings += step_findings(rows, self._expected(step))
            tokens = read(self._folder, "rollouts", list(COLUMNS), step=step)
            self._found.findings += value_findings(rows.where["rollouts"], tokens)
            for name, beside in self._by_token(step).items():
                self._found.findings += token_findings(rows.where[name], tokens, beside)
            if rows.batch is not None:
                self._found.findings += self._foreign(step, rows.batch)
            elif self._manifest.trains:
                self._found.notes.append(f"step {step} is not done: it has no batch yet")
            elif not self._is_collected(step):
                self._found.notes.append(f"step {step} is not done: it is not all collected yet")
        except ShardError as error:
            # The shard itself is among the findings.
            self._found.notes.append(f"step {step}: its rows could not be checked: {error}")

    def _step_rows(self, step: int) -> StepRows:
        folder = self._folder
        where = {name: folder.dataset(name, step=step) for name in PARTITION_KEYS if _is_by_step(name)}
        where["states"] = folder.dataset("states")
        scores = {}
        for scorer in stored_scorers(folder):
            where[f"scores {scorer}"] = folder.dataset("scores", scorer=scorer, step=step)
            scores[scorer] = self._frame("scores", ["trajectory_id"], scorer=scorer, step=step)
        others = {
            name: self._frame(name, ["trajectory_id"], step=step)["trajectory_id"].to_list()
            for name in ("routing", "states")
        }
        tokens = {name: rows["trajectory_id"].to_pylist() for name, rows in self._by_token(step).items()}
        where |= {f"logprobs {each}": folder.dataset("logprobs", policy=each, step=step) for each in POLICIES}
        has_batch = bool(self._files.keys(f"batches/step={step:06d}/*.arrow"))
        chosen = ["run", "order", "trajectory_id", "source", "source_step"]
        return StepRows(
            step=step,
            where=where,
            planned=group_numbers(read_plan(folder, step)),
            rollouts=self._frame("rollouts", ["trajectory_id", *_ROLLOUT], step=step),
            scores=scores,
            groups=self._frame("groups", ["run", "group", "subgroup"], step=step),
            batch=self._frame("batches", chosen, step=step) if has_batch else None,
            others=others,
            tokens=tokens,
        )

    def _by_token(self, step: int) -> dict[str, pa.Table]:
        """What lies beside the step's rollouts with a value for each token: annotations, "logprobs POLICY"."""
        columns = ["trajectory_id", "logprobs"]
        found = {
            f"logprobs {policy}": read(self._folder, "logprobs", columns, policy=policy, step=step)
            for policy in POLICIES
        }
        columns = [*columns, "entropy", "ratio", "clipped"]
        return found | {"annotations": read(self._folder, "annotations", columns, step=step)}

    def _frame(self, dataset: str, columns: list[str], **partition: int | str) -> pl.DataFrame:
        rows = pl.from_arrow(read(self._folder, dataset, columns, **partition))
        assert isinstance(rows, pl.DataFrame)
        return rows

    def _misplaced(self) -> Iterator[Finding]:
        """Sources that are not where they lay."""
        for source in self._manifest.sources:
            try:
                wrong = misplaced(source)
            except StoreError as error:
                wrong = str(error)
            if wrong:
                yield Finding(self._folder.path(MANIFEST), wrong, "bring the source back to where it lay")

    def _foreign(self, step: int, batch: pl.DataFrame) -> Iterator[Finding]:
        """Rows of a batch whose rollout lies in another step or run, and is not there."""
        for (source, source_step), chosen in batch.group_by("source", "source_step"):
            if (source, source_step) == ("", step):
                continue
            origin = RunFolder(str(source)) if source else self._folder
            try:
                stored = read(origin, "rollouts", ["trajectory_id"], step=int(str(source_step)))
            except StoreError as error:
                self._found.notes.append(f"step {step}: {origin.location} cannot be read: {error}")
                continue
            if lost := sorted(set(chosen["trajectory_id"]) - set(stored["trajectory_id"].to_pylist())):
                yield Finding(
                    self._folder.dataset("batches", step=step),
                    f"{len(lost)} rows have no rollout in {origin.location}, step {source_step}: {named(lost)}",
                    f"bring {origin.location} back to where it lay",
                )


def _is_by_step(dataset: str) -> bool:
    return PARTITION_KEYS[dataset] == ("step",)
