"""What the checks of `verify` read of a run, and what they find: the whole run, one shard, one policy version, one step."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

import polars as pl
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from rollmill.tasks.config import describe_invalid
from rollmill.tasks.errors import ManifestError, ShardError, StoreError
from rollmill.tasks.store.filesystem import Files, open_files
from rollmill.tasks.store.folders import MANIFEST, RunFolder
from rollmill.tasks.store.reader import list_policies, list_scorers, list_steps, read
from rollmill.tasks.store.run.group_ranges import GroupRange, group_numbers, read_plan
from rollmill.tasks.store.run.manifest import Manifest, read_manifest
from rollmill.tasks.store.run.resume import list_complete_checkpoints, list_done_steps
from rollmill.tasks.store.segments import SEGMENT_COLUMNS
from rollmill.tasks.store.shards.inventory import ShardEvent, list_file_sizes, read_inventory

RESTORE = "restore what is missing from a copy"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a stored run: the path of a file or of a data set's folder, what is wrong with it, and what to do."""

    where: str
    what: str
    remedy: str


class RolloutSettings(BaseModel):
    """Recorded settings of `rollout`: trajectories per group, and how many policy versions old a trained row may be."""

    group_size: int = 1
    max_staleness: int = 0


class ScoreSettings(BaseModel):
    """Recorded setting of `score`: fewest successful trajectories with which a group is trained on; 0: all of them."""

    min_group_size: int = 2


class StoreSettings(BaseModel):
    """Recorded setting of `store`: number of newest trained steps whose routed experts are kept; 0: all."""

    keep_routing_steps: int = 0


class EvaluateSettings(BaseModel):
    """Recorded settings of `evaluate`: steps between two evaluations (0: there are none), and their number of prompts."""

    every: int = 0
    n_prompts: int = 0


class RunSettings(BaseModel):
    """The settings of a run that determine what must be stored; with the defaults nothing must be.

    Attributes:
        steps: of the whole run; None if not recorded.
    """

    steps: int | None = None
    rollout: RolloutSettings = RolloutSettings()
    score: ScoreSettings = ScoreSettings()
    store: StoreSettings = StoreSettings()
    evaluate: EvaluateSettings = EvaluateSettings()


def read_settings_by_run(folder: RunFolder, manifest: Manifest) -> dict[str, RunSettings]:
    """Read the settings of a run and of the runs it was forked from, by run id.

    Runs whose settings are not recorded get those of the run itself.

    Raises:
        ManifestError: a setting has an invalid value; names it.
    """
    places = {
        origin.run: (f"origins.{number}.config", origin.config)
        for number, origin in enumerate(manifest.origins)
        if origin.config
    }
    read = {run: _parse_settings(folder, *each) for run, each in places.items()}
    own = _parse_settings(folder, "config", manifest.config)
    return {origin.run: own for origin in manifest.origins} | read | {manifest.run: own}


def _parse_settings(folder: RunFolder, where: str, config: Mapping[str, Any]) -> RunSettings:
    try:
        return RunSettings.model_validate(config)
    except ValidationError as error:
        raise ManifestError(
            f"{folder.path(MANIFEST)} is damaged: {describe_invalid(error, where)}"
        ) from error


ROLLOUT_COLUMNS = ("trajectory_id", "run", "group", "sample", "attempt", "status", "policy_version_first")
VALUE_COLUMNS = (
    "trajectory_id",
    "token_ids",
    "loss_mask",
    "logprobs",
    "version_span_starts",
    "version_span_versions",
    "n_completion_tokens",
    *SEGMENT_COLUMNS,
    *("turn_starts", "turn_tokens", "turn_messages"),
)
_BATCH_COLUMNS = ("run", "order", "trajectory_id", "group", "source", "source_step", "scorer")


@dataclass(frozen=True)
class RunView:
    """A stored run, as the checks of `rollmill verify` read it.

    Attributes:
        folder: of the run.
        manifest: content of run.json.
        settings_by_run: settings of this run and of those that it was forked from, by run id.
        files: the run's files.
        keys: keys of all files in data sets, listed when the view was opened.
    """

    folder: RunFolder
    manifest: Manifest
    settings_by_run: Mapping[str, RunSettings]
    files: Files
    keys: Sequence[str]

    @classmethod
    def open(cls, folder: RunFolder) -> Self:
        """Open the run in a folder for verification.

        Raises:
            ManifestError: run.json is damaged.
            StoreError: there is no run, or its storage does not answer.
        """
        manifest, files = read_manifest(folder), open_files(folder)
        return cls(
            folder, manifest, read_settings_by_run(folder, manifest), files, list(list_file_sizes(files))
        )

    @property
    def settings(self) -> RunSettings:
        """Settings of this run, not of one that it was forked from."""
        return self.settings_by_run[self.manifest.run]

    @property
    def is_finished(self) -> bool:
        """True if run.json has the status finished, which says that all steps are done."""
        return self.manifest.status == "finished"

    @cached_property
    def inventory(self) -> Mapping[str, ShardEvent] | None:
        """The last recorded event of each shard, by key; None if the inventory is damaged."""
        try:
            return read_inventory(self.folder)
        except ShardError:
            return None

    @cached_property
    def steps(self) -> Sequence[int]:
        """Steps with a plan, rollouts or a batch, ascending."""
        return sorted(
            {each for name in ("rollouts", "batches", "plans") for each in list_steps(self.folder, name)}
        )

    @cached_property
    def done_steps(self) -> Sequence[int]:
        """Steps with a batch, or, in a run that only collects, with metrics, ascending."""
        return list_done_steps(self.folder, self.manifest)

    @cached_property
    def scorers(self) -> Sequence[str]:
        """NAME@VERSION of every scorer with stored scores."""
        return list_scorers(self.folder)

    @cached_property
    def policies(self) -> Sequence[str]:
        """Policies with stored log-probabilities: `reference`, `trainer` and the names of teachers."""
        return list_policies(self.folder)

    @cached_property
    def checkpoints(self) -> Sequence[int]:
        """Versions with a complete checkpoint, ascending."""
        return list_complete_checkpoints(self.folder)

    @cached_property
    def run_scorers(self) -> Mapping[str, str]:
        """Scorer of each run, NAME@VERSION by run id, from the first batch of the run that names one."""
        found: dict[str, str] = {}
        for step in list_steps(self.folder, "batches"):
            run = self.manifest.run_at_step(step)
            # Rows with a source were scored in another run, possibly by another scorer. A batch that cannot be read is a
            # finding of `find_damage`, and a later one names the scorer too.
            with suppress(ShardError):
                if run not in found:
                    rows = self.frame("batches", ("scorer", "source"), step=step)
                    own = rows.filter((pl.col("scorer") != "") & (pl.col("source") == ""))["scorer"]
                    found |= {run: own[0]} if len(own) else {}
        return found

    def frame(self, dataset: str, columns: Sequence[str], **partition: int | str) -> pl.DataFrame:
        """Read some columns of one partition of a data set."""
        rows = pl.from_arrow(read(self.folder, dataset, columns, **partition))
        assert isinstance(rows, pl.DataFrame)
        return rows

    @property
    def versions(self) -> Sequence[int]:
        """Policy versions that have, or should have, held-out rows or a checkpoint, ascending."""
        stored = {
            each for name in ("evaluations", "evaluation_scores") for each in list_steps(self.folder, name)
        }
        return sorted({*stored, *self.checkpoints, *self.due_evaluations})

    @cached_property
    def due_evaluations(self) -> Sequence[int]:
        """Versions whose evaluation must be complete: those that have one, and the last version of a finished run.

        A version without any evaluation need not have been due, since `evaluate.every` may change on resume; the inventory
        shows a lost one.
        """
        evaluate, first = self.settings.evaluate, self.manifest.first_step
        if not (evaluate.every and evaluate.n_prompts):
            return []
        n_batches = len(list_steps(self.folder, "batches"))
        # While the run continues, the last step may be open, and the version before it under evaluation.
        last = n_batches if self.is_finished else max(n_batches - 1, 0) - 1
        begun = {each for each in list_steps(self.folder, "evaluations") if first <= each <= last}
        return sorted(begun | ({last} if self.is_finished and last == self.settings.steps else set()))


@dataclass(frozen=True, slots=True)
class ShardView:
    """One file in a data set of a run, by its key."""

    run: RunView
    key: str

    @property
    def where(self) -> str:
        """Path of the file."""
        return self.run.folder.path(self.key)


@dataclass(frozen=True, slots=True)
class VersionView:
    """The stored evaluation and checkpoint of one policy version of a run."""

    run: RunView
    version: int

    def read_held_out_ids(self) -> list[str]:
        """Read the trajectory ids of the version's evaluation; an id that is stored twice is returned twice."""
        rows = read(self.run.folder, "evaluations", ["trajectory_id"], version=self.version)
        ids: list[str] = rows["trajectory_id"].to_pylist()
        return ids


@dataclass(frozen=True)
class StepView:
    """The stored rows of one step of a run; each data set is read when a check first asks for it.

    Of a step that is being written, rows that belong to others are read before these, which are stored before them.
    """

    run: RunView
    step: int

    def read_in_order(self) -> None:
        """Read the ids that the checks compare; a data set that cannot be read is left to the check that needs it."""
        for name in ("batch", "scores", "groups", "rollouts"):
            with suppress(StoreError):
                getattr(self, name)

    def where(self, dataset: str, **outer: str) -> str:
        """Return the folder that has this step's rows of a data set; `outer` has further partition keys, as `scorer`.

        For `states` without `outer`, return the folder of the whole data set.
        """
        if dataset == "states" and not outer:
            # One folder for each environment.
            return self.run.folder.dataset(dataset)
        return self.run.folder.dataset(dataset, **outer, step=self.step)

    @property
    def writer(self) -> str:
        """Id of the run that wrote the step: this run, or the one that it was forked from."""
        return self.run.manifest.run_at_step(self.step)

    @property
    def settings(self) -> RunSettings:
        """Settings of the run that wrote the step."""
        return self.run.settings_by_run[self.writer]

    @property
    def scorer(self) -> str:
        """NAME@VERSION of the scorer by which the step's own rows are trained on, or of the run that wrote it; "" if it is not known."""
        # A resumed run may have a newer version of its scorer.
        with suppress(ShardError):
            if named := sorted(set(self.own_batch_rows()["scorer"]) & set(self.run.scorers)):
                return str(named[0])
        only = self.run.scorers[0] if len(self.run.scorers) == 1 else ""
        return self.run.run_scorers.get(self.writer, only)

    @property
    def is_done(self) -> bool:
        """True if all planned rows must exist: the step has a batch or, in a run that only collects, metrics."""
        return self.has_batch or (not self.run.manifest.trains and self.step in self.run.done_steps)

    @cached_property
    def has_batch(self) -> bool:
        """True if a batch is stored, also one that cannot be read or has no rows."""
        return bool(self.run.files.keys(f"batches/step={self.step:06d}/*.arrow"))

    @cached_property
    def planned(self) -> Sequence[int]:
        """Numbers of the groups in the step's plan and its refills; empty if the step sampled nothing."""
        return group_numbers(self.plan)

    @cached_property
    def plan(self) -> Sequence[GroupRange]:
        """The step's plan and its refills; empty if the step sampled nothing."""
        return read_plan(self.run.folder, self.step)

    @cached_property
    def rollouts(self) -> pl.DataFrame:
        """The step's rows of `rollouts`, with the columns ROLLOUT_COLUMNS (ids, status, first policy version)."""
        return self.run.frame("rollouts", ROLLOUT_COLUMNS, step=self.step)

    @cached_property
    def rollout_values(self) -> pa.Table:
        """The step's rows of `rollouts`, with the columns VALUE_COLUMNS (token ids and values by token)."""
        return read(self.run.folder, "rollouts", VALUE_COLUMNS, step=self.step)

    @cached_property
    def groups(self) -> pl.DataFrame:
        """The step's rows of `groups`, with the columns run, group and subgroup."""
        return self.run.frame("groups", ("run", "group", "subgroup"), step=self.step)

    @cached_property
    def batch(self) -> pl.DataFrame | None:
        """The step's rows of `batches`; None if there is no batch yet.

        The columns are run, order, trajectory_id, group, source, source_step and scorer.
        """
        return self.run.frame("batches", _BATCH_COLUMNS, step=self.step) if self.has_batch else None

    @cached_property
    def scores(self) -> Mapping[str, pl.Series]:
        """Ids of the trajectories of the step that have a score, by scorer, NAME@VERSION."""
        return {
            scorer: self.run.frame("scores", ("trajectory_id",), scorer=scorer, step=self.step)[
                "trajectory_id"
            ]
            for scorer in self.run.scorers
        }

    @cached_property
    def token_rows(self) -> Mapping[str, pa.Table]:
        """The step's rows that have a value for each token, by folder: annotations, and log-probabilities by each policy."""
        read_rows = partial(read, self.run.folder, step=self.step)
        found = {
            self.where("logprobs", policy=each): read_rows(
                "logprobs", ["trajectory_id", "logprobs"], policy=each
            )
            for each in self.run.policies
        }
        columns = ["trajectory_id", "logprobs", "entropy", "ratio", "clipped"]
        return found | {self.where("annotations"): read_rows("annotations", columns)}

    def own_batch_rows(self) -> pl.DataFrame:
        """Return the rows of the step's batch that this run sampled in the same step; empty if there is no batch."""
        if self.batch is None:
            return pl.DataFrame(schema={"trajectory_id": pl.String, "scorer": pl.String})
        return self.batch.filter((pl.col("source") == "") & (pl.col("source_step") == self.step))
