"""What of a run a scorer has not scored yet, step by step: a function of what lies in the folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flows.config import RescoreConfig
from tasks.errors import ConfigError
from tasks.score.registry import parts_of
from tasks.score.rescoring import READ, groups_to_score, standing_scores
from tasks.score.scoring import Scoring
from tasks.score.stored import group_sizes
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps
from tasks.store.reader import read
from tasks.store.rows import Rows, rows_of, values, where

SCORES = ("group", "trajectory_id", "status", "error")
IDS = ("group", "sample", "trajectory_id", "status")


@dataclass(frozen=True, slots=True)
class Unscored:
    """What of a step has no score yet, and how the scores that it has went.

    Attributes:
        dataset: what holds the trajectories.
        step: their step; the policy version of held-out ones.
        n_trajectories: without a score.
        n_scored: with one, failed scores included.
        n_failed: with a failed one.
        first_error: of these; empty when there are none.
    """

    dataset: Literal["rollouts", "evaluations"]
    step: int
    n_trajectories: int = 0
    n_scored: int = 0
    n_failed: int = 0
    first_error: str = ""

    @property
    def scores(self) -> str:
        """The data set that takes their scores."""
        return "scores" if self.dataset == "rollouts" else "evaluation_scores"


def check_rescoring(folder: RunFolder, config: RescoreConfig) -> None:
    """Refuse a scorer that cannot be made, one of groups where there are none, and bounds without any step.

    Raises:
        ConfigError: names the setting.
    """
    if parts_of(config.score).by_group and config.evaluations:
        remedy = "held-out trajectories are scored one by one, and this scorer compares those of a group"
        raise ConfigError("evaluations", True, remedy)
    if not _within(folder, config):
        stored = stored_steps(folder, "rollouts")
        there_are = f"steps {stored[0]} to {stored[-1]}" if stored else "no step"
        bounds = f"no step is from first_step = {config.first_step} to last_step = {config.last_step}"
        raise ConfigError(
            "--steps", config.first_step, f"{bounds}; {folder.location} has rollouts of {there_are}"
        )


def is_rescored(folder: RunFolder, config: RescoreConfig) -> bool:
    """True when every trajectory that the scorer can score has a row of it, be it a failed one."""
    config = config.model_copy(update={"redo_failed": False})
    return not unscored_steps(folder, config, Scoring(config.score, run=""))


def unscored_steps(folder: RunFolder, config: RescoreConfig, scoring: Scoring) -> list[Unscored]:
    """Every step in which something is missing."""
    return [step for step in steps_to_score(folder, config, scoring) if step.n_trajectories]


def steps_to_score(folder: RunFolder, config: RescoreConfig, scoring: Scoring) -> list[Unscored]:
    """Every step within the bounds, those without anything left included."""
    return [_counted(folder, config, scoring, step) for step in _within(folder, config)]


def _within(folder: RunFolder, config: RescoreConfig) -> list[Unscored]:
    datasets: list[Literal["rollouts", "evaluations"]] = ["rollouts"]
    if config.evaluations:
        datasets.append("evaluations")
    return [
        Unscored(dataset, step)
        for dataset in datasets
        for step in stored_steps(folder, dataset)
        if step >= config.first_step and (config.last_step < 0 or step <= config.last_step)
    ]


def _counted(folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored) -> Unscored:
    scores = _standing(folder, config, scoring, step, SCORES)[0]
    failed = where(scores, "status", "failed")
    return replace(
        step,
        n_trajectories=sum(rows.num_rows for rows in _groups(folder, config, scoring, step, IDS)),
        n_scored=scores.num_rows,
        n_failed=failed.num_rows,
        first_error=str(next(iter(values(failed, "error")), "")),
    )


def standing(folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored) -> tuple[Rows, int]:
    """The whole rows of a step's scores that stay, and how many do not."""
    return _standing(folder, config, scoring, step, None)


def _standing(
    folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored, columns: Sequence[str] | None
) -> tuple[Rows, int]:
    rollouts = rows_of(read(folder, step.dataset, IDS, **_partition(step)))
    scores = rows_of(read(folder, step.scores, columns, scorer=scoring.key, step=step.step))
    whole = _whole(folder, config, scoring, step)
    stay = standing_scores(rollouts, scores, whole=whole, redo_failed=config.redo_failed)
    return stay, scores.num_rows - stay.num_rows


def _partition(step: Unscored) -> dict[str, int]:
    return {"version" if step.dataset == "evaluations" else "step": step.step}


def unscored_groups(folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored) -> list[Rows]:
    """What is missing of a step, with all that a scorer reads, group by group."""
    return _groups(folder, config, scoring, step, READ)


def _groups(
    folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored, columns: Sequence[str]
) -> list[Rows]:
    rows = rows_of(read(folder, step.dataset, columns, **_partition(step)))
    scored = _standing(folder, config, scoring, step, SCORES)[0]
    return groups_to_score(
        rows, set(values(scored, "trajectory_id")), whole=_whole(folder, config, scoring, step)
    )


def _whole(
    folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored
) -> dict[int, int] | None:
    """For a scorer of groups the groups that are done, and the fewest survivors with which they are shown to it."""
    if not scoring.by_group:
        return None
    needs_whole = config.score.needs_whole_group
    return {group: size if needs_whole else 0 for group, size in group_sizes(folder, step.step).items()}
