"""Settings of scoring and advantages."""

from typing import Literal

from tasks.config import StageConfig, setting


class ScoreConfig(StageConfig):
    scorer: str = setting(
        "addition", "Scorer: a registered name, or an import path package.module:Class.", fixed=True
    )
    timeout_s: float = setting(60.0, "Seconds one score task may take.", gt=0.0)
    workers: int = setting(0, "Worker processes for CPU-bound scorers; 0: a thread.", ge=0)
    advantage: Literal["mean", "mean_std"] = setting(
        "mean",
        "Advantage of a trajectory: reward minus the group's mean, or that divided by its deviation.",
        fixed=True,
    )
    needs_whole_group: bool = setting(
        False,
        "Leave a group out, unscored by a group's scorer, when a trajectory of it is missing.",
        fixed=True,
    )
    max_in_flight: int = setting(64, "Most calls of an asynchronous scorer at the same time.", ge=1)
    min_group_size: int = setting(
        2, "Fewest surviving trajectories of a group that is trained on.", ge=2, fixed=True
    )
