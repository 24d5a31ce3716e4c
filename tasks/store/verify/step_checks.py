"""Checks of one step: repeated, missing and stale rows, rows without their rollout, and wrong values by token."""

from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.store.attempts import last_attempts
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_state_environments, read
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.run.group_ranges import replayed_groups
from rollmill.tasks.store.schemas import SCORABLE_STATUSES
from rollmill.tasks.store.segments import LINEAR, SEGMENT_COLUMNS, find_fault, read_segments
from rollmill.tasks.store.verify.run_views import Finding, StepView

_REMOVE_ONE = "move one of them out of the run: a shard that was copied in by hand, for example"
_RESTORE_ROLLOUTS = "a shard of rollouts is missing or damaged: restore it from a copy"
_RESTORE_ROWS = (
    "restore what is missing from a copy; what the step's batch was chosen from cannot be made again"
)


def find_repeated_rows(step: StepView) -> Iterator[Finding]:
    """Find rows that are there twice: of a trajectory, an attempt, a planned group, a group, the batch or a scorer.

    Rows of annotations and of one policy's log-probabilities are checked too; `metrics` are not: for a step that was applied
    again the last value counts.
    """
    for where, what, rows, keys in _list_unique_keys(step):
        twice = rows.group_by(keys).len().filter(pl.col("len") > 1).sort(keys).select(keys)
        if len(twice):
            named = (".".join(str(value) for value in row if value != "") for row in twice.iter_rows())
            yield Finding(where, f"{what}: {name_first(named)}", _REMOVE_ONE)


def _list_unique_keys(step: StepView) -> Iterator[tuple[str, str, pl.DataFrame, list[str]]]:
    """For each data set its folder, what to report of a repeated key, its rows, and the columns of the key."""
    rollouts, ids = step.where("rollouts"), ["trajectory_id"]
    yield rollouts, "trajectory_id are there twice", step.rollouts, ids
    attempt = ["group", "sample", "attempt"]
    yield rollouts, "group, sample, attempt are there twice", step.rollouts, attempt
    yield step.where("groups"), "group, subgroup are there twice", step.groups, ["group", "subgroup"]
    planned = pl.DataFrame({"group": list(step.planned)})
    yield step.where("plans"), "groups are planned twice", planned, ["group"]
    if step.batch is not None:
        trained = ["source", "trajectory_id"]
        yield step.where("batches"), "trajectories are trained on twice", step.batch, trained
    for scorer, scored in step.scores.items():
        yield step.where("scores", scorer=scorer), "scored twice", scored.to_frame(), ids
    for where, table in step.token_rows.items():
        rows = pl.DataFrame({"trajectory_id": table["trajectory_id"].to_pylist()})
        yield where, "trajectories are there twice", rows, ids


def find_wrong_order(step: StepView) -> Iterator[Finding]:
    """Find a batch whose rows are not numbered from 0 without a gap."""
    if step.batch is None:
        return
    order = step.batch["order"].sort().to_list()
    if order != list(range(len(order))):
        what = f"the column order of its {len(order)} rows is not 0 to {len(order) - 1}"
        yield Finding(step.where("batches"), what, _REMOVE_ONE)


def find_wrong_problems(step: StepView) -> Iterator[Finding]:
    """Find a plan that names problems, but not one for each of its groups."""
    for each in step.plan:
        if each.problems and len(each.problems) != each.n:
            what = f"the plan of the {each.n} groups from {each.first} names {len(each.problems)} problems"
            yield Finding(step.where("plans"), what, _RESTORE_ROWS)


def find_wrong_replays(step: StepView) -> Iterator[Finding]:
    """Find batch rows of stored groups that the step's plan does not name, or names elsewhere than they were sampled."""
    if step.batch is None or not step.planned:
        return
    planned = {(number, stored.source, stored.step) for number, stored in replayed_groups(step.plan).items()}
    is_own = (pl.col("source") == "") & (pl.col("source_step") == step.step)
    others = step.batch.filter(~is_own)
    for group, source, source_step in sorted(
        set(others.select("group", "source", "source_step").iter_rows())
    ):
        if (group, source, source_step) not in planned:
            where = f"step {source_step} of {source or 'this run'}"
            what = f"group {group} of its rows was sampled at {where}, and the step's plan does not say so"
            yield Finding(step.where("batches"), what, "a shard of plans is missing: restore it from a copy")


def find_rows_of_other_runs(step: StepView) -> Iterator[Finding]:
    """Find rollouts, groups and batch rows of another run than run.json names for the step."""
    stored = {"rollouts": step.rollouts, "groups": step.groups, "batches": step.batch}
    for dataset, rows in stored.items():
        if rows is not None and (others := sorted(set(rows["run"]) - {step.writer})):
            what = f"it has rows of run {name_first(others)}, by run.json the step is of run {step.writer}"
            yield Finding(step.where(dataset), what, "restore run.json, or the step's shards, from a copy")


def find_rows_without_rollout(step: StepView) -> Iterator[Finding]:
    """Find scores, batch rows, routing, states, annotations and log-probabilities without their rollout."""
    ids = {step.where("scores", scorer=scorer): set(scored) for scorer, scored in step.scores.items()}
    trained: set[str] = set()
    if step.batch is not None:
        trained = set(step.batch["trajectory_id"])
        ids[step.where("batches")] = set(step.own_batch_rows()["trajectory_id"])
        related = [
            ("routing", {}),
            *(("states", {"env": env}) for env in list_state_environments(step.run.folder)),
        ]
        for dataset, partition in related:
            rows = read(step.run.folder, dataset, ["trajectory_id"], **partition, step=step.step)
            ids.setdefault(step.where(dataset), set()).update(rows["trajectory_id"].to_pylist())
    for where, table in step.token_rows.items():
        # Rows of trained trajectories are looked up with the batch, since another step or run may have sampled them.
        ids[where] = set(table["trajectory_id"].to_pylist()) - trained
    known = set(step.rollouts["trajectory_id"])
    for where, named in ids.items():
        if missing := sorted(named - known):
            what = f"{len(missing)} rows have no rollout: {name_first(missing)}"
            yield Finding(where, what, _RESTORE_ROLLOUTS)


def find_unplanned_and_missing_rollouts(step: StepView) -> Iterator[Finding]:
    """Find planned trajectories without a rollout, and rollouts without a plan, in a step that is done."""
    if not (step.planned and step.is_done):
        return
    planned = {
        (group, sample) for group in step.planned for sample in range(step.settings.rollout.group_size)
    }
    stored = set(step.rollouts.select("group", "sample").iter_rows())
    if missing := sorted(planned - stored):
        named = name_first(f"{group}.{sample}" for group, sample in missing)
        what = f"{len(missing)} planned trajectories have no rollout: {named}"
        yield Finding(step.where("rollouts"), what, _RESTORE_ROWS)
    if beyond := sorted(stored - planned):
        named = name_first(f"{group}.{sample}" for group, sample in beyond)
        what = f"{len(beyond)} rollouts are in no plan: {named}"
        yield Finding(step.where("rollouts"), what, "a shard of plans is missing: restore it from a copy")


def find_missing_groups(step: StepView) -> Iterator[Finding]:
    """Find planned groups without a row, in a step that is done."""
    if step.planned and step.is_done and (missing := sorted(set(step.planned) - set(step.groups["group"]))):
        what = f"{len(missing)} planned groups have no row: {name_first(missing)}"
        yield Finding(step.where("groups"), what, _RESTORE_ROWS)


def find_missing_scores(step: StepView) -> Iterator[Finding]:
    """Find completed rollouts without a score by the run's scorer, in a step that is done."""
    if not (step.planned and step.is_done and step.scorer):
        return
    # An attempt that failed and was sampled again needs no score.
    due = last_attempts(step.rollouts.lazy()).filter(pl.col("status").is_in(SCORABLE_STATUSES)).collect()
    if step.settings.score.min_group_size == 0:
        whole = due.group_by("group").len().filter(pl.col("len") == step.settings.rollout.group_size)
        due = due.join(whole, on="group", how="semi")
    if missing := sorted(set(due["trajectory_id"]) - set(step.scores.get(step.scorer, ()))):
        what = f"{len(missing)} rollouts have no score: {name_first(missing)}"
        remedy = "restore the missing shard from a copy, or score them again with `rollmill rescore`"
        yield Finding(step.where("scores", scorer=step.scorer), what, remedy)


def find_stale_rows(step: StepView) -> Iterator[Finding]:
    """Find trained rows whose first policy version is not 0 to rollout.max_staleness behind their step."""
    if not step.planned:
        return
    most = step.settings.rollout.max_staleness
    trained = step.rollouts.join(step.own_batch_rows(), on="trajectory_id", how="semi")
    first = pl.col("policy_version_first")
    wrong = trained.filter((first < 0) | ~(step.step - first).is_between(0, most))
    if len(wrong):
        named = name_first(wrong["trajectory_id"])
        what = f"{len(wrong)} trained rows are not 0 to {most} policy versions behind their step: {named}"
        yield Finding(step.where("batches"), what, "report it: Rollmill admits no such row to a batch")


def find_missing_sources(step: StepView) -> Iterator[Finding]:
    """Find batch rows that another step or run sampled and does not store, as far as that run can be read.

    Raises:
        ShardError: a run that trajectories were sampled in cannot be read; the others are checked before.
    """
    if step.batch is None:
        return
    unread: StoreError | None = None
    for (source, source_step), chosen in step.batch.group_by("source", "source_step", maintain_order=True):
        if (source, source_step) == ("", step.step):
            continue
        origin = RunFolder(str(source)) if source else step.run.folder
        try:
            stored = read(origin, "rollouts", ["trajectory_id"], step=int(str(source_step)))
        except StoreError as error:
            # Raised last, so that the other sources are checked.
            unread = error
            continue
        if lost := sorted(set(chosen["trajectory_id"]) - set(stored["trajectory_id"].to_pylist())):
            yield Finding(
                step.where("batches"),
                f"{len(lost)} rows have no rollout in {origin.location}, step {source_step}: {name_first(lost)}",
                f"bring {origin.location} back to its folder",
            )
    if unread is not None:
        raise ShardError(f"{unread}") from unread


_RECOMPUTE = (
    "restore the shard from a copy, or move it out of the run: the next training on these rows, or `rollmill annotate` for a "
    "teacher's, computes them again"
)
_EXCLUDE = "keep these out of training: leave them out of any batch; report it, since Rollmill wrote them"
_LIST_COLUMNS = ("logprobs", "entropy", "ratio", "clipped")


def find_wrong_token_values(step: StepView) -> Iterator[Finding]:
    """Find annotations and log-probabilities of another length than the rollout's token_ids, or with wrong values.

    Logprobs are finite where loss_mask is True, and NaN elsewhere. Rows of trajectories that another step sampled are not
    checked.
    """
    rollouts = step.rollout_values
    masks = dict(zip(rollouts["trajectory_id"].to_pylist(), rollouts["loss_mask"], strict=True))
    for where, rows in step.token_rows.items():
        columns = [name for name in _LIST_COLUMNS if name in rows.column_names]
        found: dict[str, list[str]] = {}
        for place, name in enumerate(rows["trajectory_id"].to_pylist()):
            if name in masks:
                mask = masks[name].values.to_numpy(zero_copy_only=False)
                for wrong in _list_faults(mask, {each: rows[each][place].values for each in columns}):
                    found.setdefault(wrong, []).append(name)
        for what, names in found.items():
            yield Finding(where, f"{what}: {name_first(names)}", _RECOMPUTE)


def _list_faults(mask: np.ndarray, lists: dict[str, pa.Array]) -> Iterator[str]:
    # Values of another length cannot be assigned to tokens, so nothing else can be said of them.
    if any(len(each) != len(mask) for each in lists.values()):
        yield "values by token are not as many as token_ids"
        return
    logprobs = lists["logprobs"].to_numpy(zero_copy_only=False)
    if not np.isfinite(logprobs[mask]).all():
        yield "logprobs of sampled tokens are not finite"
    if not np.isnan(logprobs[~mask]).all():
        yield "logprobs of tokens that were not sampled are not NaN"


def find_wrong_rollout_values(step: StepView) -> Iterator[Finding]:
    """Find rollouts whose values by token contradict each other.

    Loss_mask and logprobs are as long as token_ids; logprobs are finite where the mask is True and NaN elsewhere, and all NaN if no
    policy version is known, as in an imported run; n_completion_tokens is the number of True ones; spans have a start and a version
    each, and ascend within the tokens; segments follow each other and continue tokens that their parents have; turns have the
    sampled tokens.
    """
    ids = step.rollout_values["trajectory_id"].to_numpy()
    for what, is_wrong in _find_faults(step.rollout_values):
        if is_wrong.any():
            yield Finding(step.where("rollouts"), f"{what}: {name_first(ids[is_wrong])}", _EXCLUDE)


def _find_faults(rows: pa.Table) -> Iterator[tuple[str, np.ndarray]]:
    """Return each possible fault, with a boolean array of the rows that have it."""
    n_tokens = _lengths(rows, "token_ids")
    is_uneven = (_lengths(rows, "loss_mask") != n_tokens) | (_lengths(rows, "logprobs") != n_tokens)
    yield "token_ids, loss_mask and logprobs differ in length", is_uneven
    even = rows.filter(pa.array(~is_uneven))
    mask, logprobs = _flatten(even, "loss_mask").astype(bool), _flatten(even, "logprobs")
    row_of_token = np.repeat(np.flatnonzero(~is_uneven), n_tokens[~is_uneven])

    def rows_with(is_wrong: np.ndarray) -> np.ndarray:
        return np.bincount(row_of_token[is_wrong], minlength=rows.num_rows) > 0

    # Which version sampled an imported trajectory, and by which log-probabilities, is not known.
    is_imported = _lengths(rows, "version_span_starts")[row_of_token] == 0
    is_wrong_logprob = np.where(is_imported, ~np.isnan(logprobs), ~np.isfinite(logprobs))
    yield "logprobs of sampled tokens are not finite", rows_with(mask & is_wrong_logprob)
    yield "logprobs of tokens that were not sampled are not NaN", rows_with(~mask & ~np.isnan(logprobs))
    n_sampled = np.bincount(row_of_token[mask], minlength=rows.num_rows)
    n_stored = rows["n_completion_tokens"].to_numpy()
    yield "n_completion_tokens is not the number of True in loss_mask", ~is_uneven & (n_sampled != n_stored)
    yield "spans of policy versions are not in order within the tokens", _find_wrong_spans(rows, n_tokens)
    yield "segments are not in order within the tokens of their parents", _find_wrong_segments(rows, n_tokens)
    n_turns = _lengths(rows, "turn_starts")
    is_wrong = (_lengths(rows, "turn_tokens") != n_turns) | (_lengths(rows, "turn_messages") != n_turns)
    in_turns = np.bincount(
        np.repeat(np.arange(rows.num_rows), _lengths(rows, "turn_tokens")),
        _flatten(rows, "turn_tokens"),
        rows.num_rows,
    )
    # Rows of schema 2 have no turns.
    yield "turns do not have all sampled tokens", is_wrong | ((n_turns > 0) & (in_turns != n_stored))


def _find_wrong_spans(rows: pa.Table, n_tokens: np.ndarray) -> np.ndarray:
    n_spans = _lengths(rows, "version_span_starts")
    is_wrong: np.ndarray = n_spans != _lengths(rows, "version_span_versions")
    starts, row = _flatten(rows, "version_span_starts"), np.repeat(np.arange(rows.num_rows), n_spans)
    is_outside = (starts < 0) | (starts >= n_tokens[row])
    descends = (row[1:] == row[:-1]) & (starts[1:] <= starts[:-1])
    is_wrong[row[is_outside]] = True
    is_wrong[row[1:][descends]] = True
    return is_wrong


def _find_wrong_segments(rows: pa.Table, n_tokens: np.ndarray) -> np.ndarray:
    n_segments = _lengths(rows, SEGMENT_COLUMNS[0])
    is_wrong: np.ndarray = n_segments < 1
    for name in SEGMENT_COLUMNS[1:]:
        is_wrong |= _lengths(rows, name) != n_segments
    whole = np.flatnonzero(~is_wrong)
    even = rows.filter(pa.array(~is_wrong))
    firsts = np.cumsum(n_segments[whole]) - n_segments[whole]
    # Most rows have one segment, which is known to be right without a look at each row.
    for name, value in zip(SEGMENT_COLUMNS, LINEAR[0], strict=True):
        is_wrong[whole] |= _flatten(even, name)[firsts] != value
    for row in whole[n_segments[whole] > 1].tolist():
        segments = read_segments({name: rows[name][row].as_py() for name in SEGMENT_COLUMNS})
        is_wrong[row] = bool(find_fault(segments, int(n_tokens[row])))
    return is_wrong


def _lengths(rows: pa.Table, column: str) -> np.ndarray:
    return np.asarray(pc.list_value_length(rows[column]).to_numpy(), np.int64)


def _flatten(rows: pa.Table, column: str) -> np.ndarray:
    return np.asarray(pc.list_flatten(rows[column]).to_numpy())
