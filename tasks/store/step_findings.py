"""What is wrong with the rows of one step: twice there, without what they belong to, missing, or too stale."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from tasks.store.attempts import last_attempts
from tasks.store.findings import Finding, named

SCORABLE = ("complete", "truncated")
_ONCE = "one of them is to be moved out of the run: a shard that was copied in by hand, for example"
_ORPHANS = "a shard of rollouts is missing or damaged: restore it from a copy"
_GO_ON = "restore what is missing from a copy; what the step's batch was chosen from cannot be made again"
_REPORT = "report it: Rollmill keeps this by admission"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run's settings make of a step.

    Attributes:
        run: id of the run that its rows are of.
        group_size: trajectories of a group.
        max_staleness: steps that a trained row's first policy version may lie behind.
        scorer: NAME@VERSION of the run's; empty when no batch says it.
        leaves_short_groups_unscored: True when a group that lacks a trajectory may have no scores.
        is_collected: True when all that is planned must be there, though nothing is trained.
    """

    run: str
    group_size: int
    max_staleness: int
    scorer: str = ""
    leaves_short_groups_unscored: bool = False
    is_collected: bool = False


@dataclass(frozen=True, slots=True)
class StepRows:
    """What lies in a step.

    Attributes:
        where: the folder of each data set's step, by data set.
        planned: group numbers of its plan and refills; empty when the step sampled nothing.
        rollouts: run, trajectory_id, group, sample, attempt, status, policy_version_first.
        scores: trajectory_id of each scorer's, by NAME@VERSION.
        groups: run, group, subgroup.
        batch: run, order, trajectory_id, source, source_step; None when the step has none yet.
        others: ids that routing and states are of, by data set.
        tokens: ids of the rows, by token, of trajectories that the step trains on, whichever step sampled them:
            annotations, "logprobs POLICY".
    """

    step: int
    where: Mapping[str, str]
    planned: Sequence[int]
    rollouts: pl.DataFrame
    scores: Mapping[str, pl.DataFrame]
    groups: pl.DataFrame
    batch: pl.DataFrame | None
    others: Mapping[str, Sequence[str]]
    tokens: Mapping[str, Sequence[str]] = field(default_factory=dict)


def step_findings(rows: StepRows, expected: Expected) -> list[Finding]:
    """All that is wrong with a step's rows; of a step without a batch nothing is missing yet."""
    found = [*_twice(rows), *_tokens_twice(rows), *_orphans(rows), *_of_other_runs(rows, expected)]
    if rows.planned and (rows.batch is not None or expected.is_collected):
        found += _missing(rows, expected)
    if rows.planned and rows.batch is not None:
        found += _stale(rows, rows.batch, expected)
    return found


def _twice(rows: StepRows) -> Iterator[Finding]:
    for keys in (["trajectory_id"], ["group", "sample", "attempt"]):
        if twice := _repeated(rows.rollouts, keys):
            yield Finding(rows.where["rollouts"], f"{', '.join(keys)} are there twice: {named(twice)}", _ONCE)
    for scorer, scores in rows.scores.items():
        if twice := _repeated(scores, ["trajectory_id"]):
            yield Finding(rows.where[f"scores {scorer}"], f"scored twice: {named(twice)}", _ONCE)
    if twice := _repeated(rows.groups, ["group", "subgroup"]):
        yield Finding(rows.where["groups"], f"group, subgroup are there twice: {named(twice)}", _ONCE)
    if twice := _repeated(pl.DataFrame({"group": list(rows.planned)}), ["group"]):
        yield Finding(rows.where["plans"], f"groups are planned twice: {named(twice)}", _ONCE)
    if rows.batch is not None:
        if twice := _repeated(rows.batch, ["source", "trajectory_id"]):
            ids = (each.removeprefix(".") for each in twice)
            yield Finding(rows.where["batches"], f"trajectories are trained on twice: {named(ids)}", _ONCE)
        order = rows.batch["order"].sort().to_list()
        if order != list(range(len(order))):
            what = f"the places of its {len(order)} rows are not 0 to {len(order) - 1}"
            yield Finding(rows.where["batches"], what, _ONCE)


def _tokens_twice(rows: StepRows) -> Iterator[Finding]:
    for name, ids in rows.tokens.items():
        if twice := _repeated(pl.DataFrame({"trajectory_id": list(ids)}), ["trajectory_id"]):
            yield Finding(rows.where[name], f"trajectories are there twice: {named(twice)}", _ONCE)


def _of_other_runs(rows: StepRows, expected: Expected) -> Iterator[Finding]:
    """Rows that another run wrote than the one that run.json says."""
    stored = {"rollouts": rows.rollouts, "groups": rows.groups, "batches": rows.batch}
    for dataset, each in stored.items():
        if each is not None and (others := sorted(set(each["run"]) - {expected.run})):
            what = f"it has rows of run {named(others)}, by run.json the step is of run {expected.run}"
            yield Finding(rows.where[dataset], what, "restore run.json, or the step's shards, from a copy")


def _orphans(rows: StepRows) -> Iterator[Finding]:
    """Rows whose rollout is not there."""
    known = set(rows.rollouts["trajectory_id"])
    ids = {f"scores {scorer}": set(scores["trajectory_id"]) for scorer, scores in rows.scores.items()}
    if rows.batch is not None:
        own = rows.batch.filter((pl.col("source") == "") & (pl.col("source_step") == rows.step))
        ids["batches"] = set(own["trajectory_id"])
        ids |= {dataset: set(each) for dataset, each in rows.others.items()}
    trained = set(rows.batch["trajectory_id"]) if rows.batch is not None else set[str]()
    ids |= {name: set(each) - trained for name, each in rows.tokens.items()}
    for name, each in ids.items():
        if orphans := sorted(each - known):
            yield Finding(
                rows.where[name], f"{len(orphans)} rows have no rollout: {named(orphans)}", _ORPHANS
            )


def _missing(rows: StepRows, expected: Expected) -> Iterator[Finding]:
    """What a step that has a batch lacks, by its plan."""
    planned = {(group, sample) for group in rows.planned for sample in range(expected.group_size)}
    stored = set(rows.rollouts.select("group", "sample").iter_rows())
    if lacking := sorted(planned - stored):
        what = f"{len(lacking)} planned trajectories have no rollout: {named(f'{g}.{s}' for g, s in lacking)}"
        yield Finding(rows.where["rollouts"], what, _GO_ON)
    if beyond := sorted(stored - planned):
        what = f"{len(beyond)} rollouts are in no plan: {named(f'{g}.{s}' for g, s in beyond)}"
        yield Finding(rows.where["rollouts"], what, "a shard of plans is missing: restore it from a copy")
    if unjudged := sorted(set(rows.planned) - set(rows.groups["group"])):
        what = f"{len(unjudged)} planned groups have no row: {named(unjudged)}"
        yield Finding(rows.where["groups"], what, _GO_ON)
    if expected.scorer:
        yield from _unscored(rows, expected)


def _unscored(rows: StepRows, expected: Expected) -> Iterator[Finding]:
    due = last_attempts(rows.rollouts.lazy()).filter(pl.col("status").is_in(SCORABLE)).collect()
    if expected.leaves_short_groups_unscored:
        whole = due.group_by("group").len().filter(pl.col("len") == expected.group_size)
        due = due.join(whole, on="group", how="semi")
    scores = rows.scores.get(expected.scorer)
    scored = set(scores["trajectory_id"]) if scores is not None else set[str]()
    if unscored := sorted(set(due["trajectory_id"]) - scored):
        what = f"{len(unscored)} rollouts have no score: {named(unscored)}"
        remedy = "restore the missing shard from a copy, or score them again with `rollmill rescore`"
        yield Finding(rows.where[f"scores {expected.scorer}"], what, remedy)


def _stale(rows: StepRows, batch: pl.DataFrame, expected: Expected) -> Iterator[Finding]:
    own = batch.filter((pl.col("source") == "") & (pl.col("source_step") == rows.step))
    trained = rows.rollouts.join(own, on="trajectory_id", how="semi")
    behind = rows.step - pl.col("policy_version_first")
    wrong = trained.filter(
        (behind < 0) | (behind > expected.max_staleness) | (pl.col("policy_version_first") < 0)
    )
    if len(wrong):
        what = (
            f"{len(wrong)} trained rows are not 0 to {expected.max_staleness} policy versions behind their step: "
            f"{named(wrong['trajectory_id'])}"
        )
        yield Finding(rows.where["batches"], what, _REPORT)


def _repeated(rows: pl.DataFrame, keys: list[str]) -> list[str]:
    twice = rows.group_by(keys).len().filter(pl.col("len") > 1).sort(keys).drop("len")
    return [".".join(str(value) for value in row) for row in twice.iter_rows()]
