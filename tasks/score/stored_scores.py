"""Which trajectories still need a score, which stored scores to keep, and advantages recomputed from stored scores."""

from collections.abc import Collection, Mapping

from rollmill.tasks.errors import ConfigError, ScoreError
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.group_outcomes import (
    SURVIVOR_COLUMNS,
    SURVIVOR_SCORE_COLUMNS,
    GroupOutcome,
    compute_advantages,
    survivors_from_rows,
)
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    rows_from_table,
    rows_where,
    rows_where_in,
    rows_without,
)

# Columns of a rollout that scoring needs; tokens and log-probabilities, nearly all of a row's bytes, are not read.
SCORING_COLUMNS = (
    *("group", "sample", "trajectory_id", "env", "status"),
    *("example", "messages", "outcome", "n_completion_tokens", "turn_messages", "turn_tokens"),
)


def groups_to_score(
    rollouts: Rows,
    scored: Collection[object],
    *,
    whole: Mapping[int, int] | None,
) -> list[Rows]:
    """Return the rollouts of a step that still need a score, one element for each group, by group and sample.

    Args:
        rollouts: rows of one step with the columns group, sample, trajectory_id and status.
        scored: trajectory ids that have a score.
        whole: for a group scorer, the finished groups and the smallest number of survivors to score; None for a scorer of
            single trajectories.

    Example: of a group's samples 0, 1 and 2, 1 failed and 0 has a score. Sample 2 is returned; for a group scorer, nothing is.
    """
    survivors = select_scorable(rollouts)
    if whole is None:
        left = rows_without(survivors, "trajectory_id", scored)
        return _by_group(left)
    # A group scorer compares trajectories, so that a group with a score is not scored again in part.
    begun = set(column_values(rows_where_in(survivors, "trajectory_id", scored), "group"))
    return [
        rows
        for rows in _by_group(rows_without(survivors, "group", begun))
        if (group := rows.column("group")[0].as_py()) in whole and rows.num_rows >= whole[group]
    ]


def scores_to_keep(
    rollouts: Rows, scores: Rows, *, whole: Collection[int] | None, redo_failed: bool = False
) -> Rows:
    """Return the stored scores of a step that stay valid; trajectories with other scores are to be scored again.

    Failed scores are left out if they are to be redone. For a group scorer, the scores of a group stay together or not at all: they
    are left out if a survivor has none, because a trajectory was sampled again.

    Args:
        rollouts: as for `groups_to_score`.
        scores: the scorer's rows of that step with the columns group, trajectory_id and status.
        whole: finished groups, for a group scorer; None for a scorer of single trajectories.
        redo_failed: True to redo failed scores.

    Example: in a group with survivors 0 and 1, of which 0 is scored, a scorer of single trajectories keeps that score, a group
    scorer does not.
    """
    failed = rows_where(scores, "status", "failed") if redo_failed else scores.slice(0, 0)
    if whole is None:
        return rows_without(scores, "trajectory_id", column_values(failed, "trajectory_id"))
    missing = rows_without(select_scorable(rollouts), "trajectory_id", column_values(scores, "trajectory_id"))
    stale = {*column_values(failed, "group"), *column_values(missing, "group")} & set(whole)
    return rows_without(scores, "group", stale)


def _by_group(rows: Rows) -> list[Rows]:
    ordered = rows.sort_by([("group", "ascending"), ("sample", "ascending")])
    return [rows_where(ordered, "group", group) for group in dict.fromkeys(column_values(ordered, "group"))]


_ROLLOUT_COLUMNS = ("group", *SURVIVOR_COLUMNS)
_SCORE_COLUMNS = ("group", *SURVIVOR_SCORE_COLUMNS)


def recompute_advantages(
    folder: RunFolder,
    step: int,
    scorer: str,
    config: ScoreConfig,
    *,
    only: Collection[int] | None = None,
    field: str = "retrain.scores",
) -> dict[int, tuple[GroupOutcome, ...]]:
    """Compute the outcomes, with advantages, of a step's groups from a scorer's stored rewards.

    Groups that are unfinished or have no score are left out; `only` limits the result to groups with these numbers. `scorer` is NAME@VERSION, `field` the
    setting that an error names.

    Raises:
        ConfigError: a group is scored only in part.
        ShardError: a shard cannot be read.
        ScoreError: the advantage function returned the wrong shape, or the turns of a trajectory are not known.
    """
    rollouts = rows_from_table(read(folder, "rollouts", _ROLLOUT_COLUMNS, step=step))
    scores = rows_from_table(read(folder, "scores", _SCORE_COLUMNS, scorer=scorer, step=step))
    scored = set(column_values(scores, "group"))
    numbers = scored if only is None else scored.intersection(only)
    rollouts, scores = rows_where_in(rollouts, "group", numbers), rows_where_in(scores, "group", numbers)
    if n_unscored := rows_without(
        select_scorable(rollouts), "trajectory_id", column_values(scores, "trajectory_id")
    ).num_rows:
        remedy = (
            f"{n_unscored} trajectories of step {step} of {folder.location} have no score by it, and others of their "
            "groups have; `rollmill rescore` scores the rest"
        )
        raise ConfigError(field, scorer, remedy)
    sizes = read_group_sizes(folder, step)
    try:
        return _compute_groups(rollouts, scores, numbers, sizes, config)
    except ScoreError as error:
        raise ScoreError(f"step {step} of {folder.location}: {error}") from error


def _compute_groups(
    rollouts: Rows, scores: Rows, numbers: Collection[object], sizes: Mapping[int, int], config: ScoreConfig
) -> dict[int, tuple[GroupOutcome, ...]]:
    return {
        group: compute_advantages(
            config,
            group=group,
            env=str(column_values(of_group, "env")[0]),
            expected=sizes[group],
            survivors=survivors_from_rows(of_group, of_scorer),
            dropped=rows_where(of_scorer, "status", "dropped").num_rows,
        )
        for group in sorted(int(str(each)) for each in numbers)
        if group in sizes
        and (of_group := rows_where(rollouts, "group", group)).num_rows
        and (of_scorer := rows_where(scores, "group", group)).num_rows
    }


def read_group_sizes(folder: RunFolder, step: int) -> dict[int, int]:
    """Return the number of requested trajectories (G) of each finished group of a step; steps may differ in G."""
    rows = read(folder, "groups", ["group", "expected"], step=step)
    return dict(zip(rows["group"].to_pylist(), rows["expected"].to_pylist(), strict=True))
