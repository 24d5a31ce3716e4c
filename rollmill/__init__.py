"""Rollmill: batch reinforcement learning for language models whose loop is a workflow."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollmill.tasks.look.tables.run_frames import RunFrames

__all__ = ["open_run"]


def open_run(*runs: str, scorer: str = "") -> "RunFrames":
    """Open stored runs for reading, as lazy Polars frames and for queries in SQL.

    Args:
        runs: location of each run, on a disk or s3://bucket/prefix; or its name below runs/.
        scorer: NAME@VERSION of the rewards in `trajectories`; empty: the scorer that each run trains on.

    Example:
        >>> run = rollmill.open_run("quickstart")
        >>> run.trajectories.group_by("example_id").agg(pl.col("reward").mean()).collect()

    Raises:
        ConfigError: no run is given, there is no such run, or no run has scores of this scorer.
    """
    from rollmill.tasks.errors import ConfigError
    from rollmill.tasks.look.tables.run_frames import RunFrames
    from rollmill.tasks.store.run.run_search import find_run

    if not runs:
        raise ConfigError("RUN", "", "name at least one run")
    return RunFrames([find_run(str(run)) for run in runs], scorer)
