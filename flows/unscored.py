"""What of a run a scorer has not scored yet, step by step: a function of what lies in the folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flows.config import RescoreConfig
from tasks.errors import ConfigError
from tasks.score.registry import parts_of
from tasks.score.rescoring import READ, groups_to_score
from tasks.score.scoring import Scoring
from tasks.score.stored import group_sizes
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps
from tasks.store.reader import read
from tasks.store.rows import Rows, rows_of, values

IDS = ("group", "sample", "trajectory_id", "status")


@dataclass(frozen=True, slots=True)
class Unscored:
    """A step with trajectories that have no score yet.

    Attributes:
        dataset: what holds the trajectories.
        step: their step; the policy version of held-out ones.
    """

    dataset: Literal["rollouts", "evaluations"]
    step: int
    n_trajectories: int

    @property
    def scores(self) -> str:
        """The data set that takes their scores."""
        return "scores" if self.dataset == "rollouts" else "evaluation_scores"


def check_rescoring(config: RescoreConfig) -> None:
    """Refuse a scorer that cannot be made, or that compares a group's trajectories where there are no groups.

    Raises:
        ConfigError: names the setting.
    """
    if parts_of(config.score).by_group and config.evaluations:
        remedy = "held-out trajectories are scored one by one, and this scorer compares those of a group"
        raise ConfigError("evaluations", True, remedy)


def is_rescored(folder: RunFolder, config: RescoreConfig) -> bool:
    """True when every trajectory that the scorer can score has a row of it."""
    return not unscored_steps(folder, config, Scoring(config.score, run=""))


def unscored_steps(folder: RunFolder, config: RescoreConfig, scoring: Scoring) -> list[Unscored]:
    """Every step in which something is missing."""
    found = []
    datasets: list[Literal["rollouts", "evaluations"]] = ["rollouts"]
    if config.evaluations:
        datasets.append("evaluations")
    for dataset in datasets:
        for step in stored_steps(folder, dataset):
            if step >= config.first_step and (config.last_step < 0 or step <= config.last_step):
                groups = _groups(folder, config, scoring, Unscored(dataset, step, 0), IDS)
                found.append(Unscored(dataset, step, sum(rows.num_rows for rows in groups)))
    return [step for step in found if step.n_trajectories]


def unscored_groups(folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored) -> list[Rows]:
    """What is missing of a step, with all that a scorer reads, group by group."""
    return _groups(folder, config, scoring, step, READ)


def _groups(
    folder: RunFolder, config: RescoreConfig, scoring: Scoring, step: Unscored, columns: Sequence[str]
) -> list[Rows]:
    partition = {"version" if step.dataset == "evaluations" else "step": step.step}
    rows = rows_of(read(folder, step.dataset, columns, **partition))
    scored = rows_of(read(folder, step.scores, ["trajectory_id"], scorer=scoring.key, step=step.step))
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
