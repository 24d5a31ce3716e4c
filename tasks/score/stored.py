"""Stored groups judged anew, by the scores of any scorer."""

from collections.abc import Collection

from tasks.errors import ConfigError
from tasks.score.config import ScoreConfig
from tasks.score.outcome import GroupOutcome, judge_group, survivors_of
from tasks.score.scoring import scorable
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.rows import rows_of, values, where, where_in, without

_READ = ("group", "sample", "trajectory_id", "env", "status", "n_completion_tokens")
_SCORES = ("group", "trajectory_id", "status", "reward", "subgroup")


def judged_groups(
    folder: RunFolder,
    step: int,
    scorer: str,
    config: ScoreConfig,
    *,
    only: Collection[int] | None = None,
) -> dict[int, tuple[GroupOutcome, ...]]:
    """What becomes of the groups of a step under a scorer's rewards; those without any score, or not done, are left out.

    Args:
        folder: of the run that sampled them.
        step: their step.
        scorer: NAME@VERSION.
        config: how advantages are taken.
        only: numbers of the groups wanted; None: all.

    Raises:
        ConfigError: some of a group's trajectories have a score, and others were never scored.
        ShardError: a shard cannot be read.
    """
    rollouts = rows_of(read(folder, "rollouts", _READ, step=step))
    scores = rows_of(read(folder, "scores", _SCORES, scorer=scorer, step=step))
    numbers = set(values(scores, "group")) if only is None else only
    rollouts, scores = where_in(rollouts, "group", numbers), where_in(scores, "group", numbers)
    if n_unscored := without(scorable(rollouts), "trajectory_id", values(scores, "trajectory_id")).num_rows:
        remedy = (
            f"{n_unscored} trajectories of step {step} of {folder.location} have no score by it, and others of their "
            "groups have; `rollmill rescore` scores the rest"
        )
        raise ConfigError("retrain.scores", scorer, remedy)
    sizes = group_sizes(folder, step)
    return {
        group: judge_group(
            config,
            group=group,
            env=str(values(of_group, "env")[0]),
            expected=sizes[group],
            survivors=survivors_of(of_group, of_scorer),
            dropped=where(of_scorer, "status", "dropped").num_rows,
        )
        for group in sorted(int(str(each)) for each in numbers)
        if group in sizes
        and (of_group := where(rollouts, "group", group)).num_rows
        and (of_scorer := where(scores, "group", group)).num_rows
    }


def group_sizes(folder: RunFolder, step: int) -> dict[int, int]:
    """Trajectories that were asked for (G) of each group of a step that is done; another step may have another G."""
    rows = read(folder, "groups", ["group", "expected"], step=step)
    return dict(zip(rows["group"].to_pylist(), rows["expected"].to_pylist(), strict=True))
