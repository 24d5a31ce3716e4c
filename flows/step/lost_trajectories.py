"""What a step loses: its failures as they are seen, so many of which end the run, and the fate of each trajectory."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

import polars as pl

from rollmill.tasks.errors import FailedShareError
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.store.attempts import last_attempts
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.rows import Rows

FAILED = ("failed", "cancelled")
LOST = (*FAILED, "dropped")
COLUMNS = ["trajectory_id", "status", "error_type", "error"]


class FailureWatch:
    """Logs each failed rollout and score of a step once, and raises FailedShareError when too many have failed.

    Args:
        step: the step.
        n_planned: trajectories of the step.
        max_share: share of them that may fail.
        logger: gives the logger of the task run, or flow run, that saw the failure.
        uncounted: gives the types of errors of a group that do not count for the share; they are logged as others.
    """

    def __init__(
        self,
        step: int,
        n_planned: int,
        max_share: float,
        logger: Callable[[], logging.Logger | logging.LoggerAdapter[logging.Logger]],
        uncounted: Callable[[int], Collection[str]] = lambda group: (),
    ) -> None:
        self._step, self._n_planned, self._max_share, self._logger = step, n_planned, max_share, logger
        self._uncounted = uncounted
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def see(self, rows: Rows, *, is_new: bool = True) -> None:
        """Count the failed and cancelled rows of `rollouts` or `scores`; log these and dropped ones if they are new.

        Raises:
            FailedShareError: more failed than the share allows; says what failed most.
        """
        for row in rows.select([*COLUMNS, "group"]).to_pylist():
            if row["status"] not in LOST:
                continue
            if is_new:
                # An error may quote what a model wrote, with terminal escapes.
                said = (escape_controls(str(row[column])) for column in COLUMNS)
                self._logger().warning("trajectory %s %s: %s: %s", *said)
            if row["status"] in FAILED and row["error_type"] not in self._uncounted(row["group"]):
                self._kinds[row["error_type"]] += 1
                # One example a kind: thousands of failures usually have the same cause.
                self._examples.setdefault(row["error_type"], row["error"])
        if self.n_failed > self._max_share * self._n_planned:
            (kind, n), *_ = self._kinds.most_common(1)
            raise FailedShareError(
                f"step {self._step}: {self.n_failed} of {self._n_planned} trajectories failed, rollout.max_failed_share "
                f"allows {self._max_share:g}; {n} times {kind}, for example: {self._examples[kind]}\n"
                "`rollmill inspect RUN --status failed,unscored` shows them. Nothing else is lost: fix the cause, then run the "
                "same command with --redo-failed, which samples and scores them again (`rollmill improve` does so without "
                "that option); or raise the share, to continue without them"
            )

    def plan_more(self, n: int) -> None:
        """Add the `n` trajectories of a further group to the total, of which a share may fail."""
        self._n_planned += n

    @property
    def n_failed(self) -> int:
        """Number of failed and cancelled trajectories and scores so far, those of uncounted errors left out."""
        return self._kinds.total()


ROLLOUT_COLUMNS = (
    "trajectory_id",
    "group",
    "sample",
    "attempt",
    "env",
    "n_completion_tokens",
    "status",
    "error_type",
)
SCORE_COLUMNS = ("trajectory_id", "subgroup", "status", "error_type")
GROUP_COLUMNS = ("group", "subgroup", "env", "reason", "reward_mean")


@dataclass(frozen=True, slots=True)
class StoredStepRows:
    """Stored rollouts, scores and groups of one step, without tokens and texts.

    Attributes:
        rollouts: all attempts; columns ROLLOUT_COLUMNS.
        scores: of one scorer; columns SCORE_COLUMNS.
        groups: columns GROUP_COLUMNS.
    """

    rollouts: pl.DataFrame
    scores: pl.DataFrame
    groups: pl.DataFrame

    @classmethod
    def read(cls, folder: RunFolder, step: int, scorer: str) -> Self:
        """Read the rollouts, groups and scores by `scorer` (NAME@VERSION) that are stored for one step."""
        return cls(
            rollouts=scan(folder, "rollouts", ROLLOUT_COLUMNS, step=step).collect(),
            scores=scan(folder, "scores", SCORE_COLUMNS, scorer=scorer, step=step).collect(),
            groups=scan(folder, "groups", GROUP_COLUMNS, step=step).collect(),
        )


KEPT = "kept"
TRUNCATED = "truncated"

# Sampled tokens at which a bin of lengths ends; the last bin has no end.
LENGTH_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def find_drops(stored: StoredStepRows, *, train_truncated: bool = True) -> pl.DataFrame:
    """Return why each trajectory of a step was lost: a row each with env, cause (`kept` if not lost) and n_tokens.

    Of several attempts the last one counts.

    A cause is a type of error, of the rollout or of its score, or the reason why its
    group was left out: too few survivors, or not whole. A group without spread in reward loses nothing. Of a group that
    is trained on without its truncated trajectories (`train_truncated` False), these are lost to `truncated`.
    """
    rollouts = last_attempts(stored.rollouts.lazy()).select(
        "trajectory_id",
        "group",
        "env",
        pl.col("n_completion_tokens").alias("n_tokens"),
        pl.when(pl.col("status").is_in(["failed", "cancelled"])).then("error_type").alias("rollout_cause"),
        (pl.col("status") == TRUNCATED).alias("is_truncated"),
    )
    scores = stored.scores.lazy().select(
        "trajectory_id",
        "subgroup",
        pl.when(pl.col("status") == "failed")
        .then("error_type")
        .when(pl.col("status") == "dropped")
        .then(pl.lit("dropped_by_scorer"))
        .alias("score_cause"),
    )
    groups = stored.groups.lazy().select(
        "group",
        "subgroup",
        "reason",
        pl.when(pl.col("reason").is_in(["", "no_reward_spread"]).not_()).then("reason").alias("group_cause"),
    )
    # Truncated trajectories count for the group's advantages, so its reason is empty, yet they are not in the batch.
    is_filtered = pl.col("is_truncated") & (pl.col("reason") == "") & pl.lit(not train_truncated)
    filtered = pl.when(is_filtered).then(pl.lit(TRUNCATED))
    fates = (
        rollouts.join(scores, on="trajectory_id", how="left")
        # A trajectory without a score is in no subgroup; its group's reason is that of the first.
        .with_columns(pl.col("subgroup").fill_null(0))
        .join(groups, on=["group", "subgroup"], how="left")
        .with_columns(
            pl.coalesce("rollout_cause", "score_cause", "group_cause", filtered, pl.lit(KEPT)).alias("cause")
        )
    )
    return fates.select("env", "cause", "n_tokens").collect()


def drop_metrics(fates: pl.DataFrame, env: str = ALL) -> list[Metric]:
    """Compute metrics of the rows of `find_drops`: counts and share lost, counts by cause and length, mean lengths.

    `env` is the environment that all rows are of.
    """
    lost = fates.filter(pl.col("cause") != KEPT)
    metrics = [
        Metric("drops/trajectories", env, "value", float(len(lost))),
        Metric("drops/share", env, "value", len(lost) / max(1, len(fates))),
    ]
    metrics += [
        Metric(f"drops/cause_{cause}", env, "value", float(n))
        for cause, n in lost["cause"].value_counts(sort=True).rows()
    ]
    for name, rows in (("kept", fates.filter(pl.col("cause") == KEPT)), ("lost", lost)):
        mean = rows["n_tokens"].cast(pl.Float64).mean()
        if isinstance(mean, float):
            metrics.append(Metric(f"drops/{name}_tokens", env, "mean", mean))
        metrics += [
            Metric(f"drops/{name}_up_to_{edge}_tokens", env, "value", float(n))
            for edge, n in _by_length(rows["n_tokens"].to_list())
        ]
    return metrics


def _by_length(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return (upper edge, count) of each bin with lengths in it. Example: 3, 16 and 40 give ("16", 2), ("64", 1)."""
    counts: dict[int | None, int] = {}
    for length in lengths:
        edge = next((edge for edge in LENGTH_EDGES if length <= edge), None)
        counts[edge] = counts.get(edge, 0) + 1
    edges = [*LENGTH_EDGES, None]
    return [("any" if edge is None else str(edge), counts[edge]) for edge in edges if edge in counts]


def drop_line(fates: pl.DataFrame) -> str:
    """Return the number and causes of lost trajectories, from the rows of `find_drops`; empty if none is lost.

    Example: "13 lost (9 RequestError, 4 ScoreError)".
    """
    lost = fates.filter(pl.col("cause") != KEPT)
    if lost.is_empty():
        return ""
    causes = ", ".join(f"{n} {cause}" for cause, n in lost["cause"].value_counts(sort=True).rows())
    return f"{len(lost)} lost ({causes})"
