"""What a step lost: trajectories that no batch can hold, by cause and by length.

Losing them is not neutral: a deadline cuts the long ones, a timeout those of a slow environment. So the step says
how many went, why, and how long they were beside those that stayed.
"""

from collections.abc import Sequence

import polars as pl

from flows.reporting.step_rows import StepRows
from tasks.observe.metrics import Metric
from tasks.store.attempts import last_attempts

KEPT = "kept"
TRUNCATED = "truncated"
LENGTH_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Sampled tokens at which a bin of lengths ends; the last bin has no end."""


def drops(stored: StepRows, *, train_truncated: bool = True) -> pl.DataFrame:
    """Each trajectory of a step, by its last attempt, with its fate, columns env, cause and n_tokens; cause is `kept` for survivors.

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
    is_filtered = pl.col("is_truncated") & (pl.col("reason") == "") & pl.lit(not train_truncated)
    filtered = pl.when(is_filtered).then(pl.lit(TRUNCATED))
    fates = (
        rollouts.join(scores, on="trajectory_id", how="left")
        .with_columns(pl.col("subgroup").fill_null(0))
        .join(groups, on=["group", "subgroup"], how="left")
        .with_columns(
            pl.coalesce("rollout_cause", "score_cause", "group_cause", filtered, pl.lit(KEPT)).alias("cause")
        )
    )
    return fates.select("env", "cause", "n_tokens").collect()


def drop_metrics(fates: pl.DataFrame) -> list[Metric]:
    """Counts by cause and by bin of lengths, and the mean length of what stayed and of what went."""
    lost = fates.filter(pl.col("cause") != KEPT)
    metrics = [
        Metric("drops/trajectories", "all", "value", float(len(lost))),
        Metric("drops/share", "all", "value", len(lost) / max(1, len(fates))),
    ]
    metrics += [
        Metric(f"drops/cause_{cause}", "all", "value", float(n))
        for cause, n in lost["cause"].value_counts(sort=True).rows()
    ]
    for name, rows in (("kept", fates.filter(pl.col("cause") == KEPT)), ("lost", lost)):
        mean = rows["n_tokens"].cast(pl.Float64).mean()
        if isinstance(mean, float):
            metrics.append(Metric(f"drops/{name}_tokens", "all", "mean", mean))
        metrics += [
            Metric(f"drops/{name}_up_to_{edge}_tokens", "all", "value", float(n))
            for edge, n in _by_length(rows["n_tokens"].to_list())
        ]
    return metrics


def _by_length(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """(upper edge, count) of each bin that is not empty. Example: lengths 3, 16 and 40 give ("16", 2), ("64", 1)."""
    counts: dict[int | None, int] = {}
    for length in lengths:
        edge = next((edge for edge in LENGTH_EDGES if length <= edge), None)
        counts[edge] = counts.get(edge, 0) + 1
    edges = [*LENGTH_EDGES, None]
    return [("any" if edge is None else str(edge), counts[edge]) for edge in edges if edge in counts]


def drop_line(fates: pl.DataFrame) -> str:
    """What was lost, in words; empty for nothing. Example: "13 lost (9 RequestError, 4 Deadline)"."""
    lost = fates.filter(pl.col("cause") != KEPT)
    if lost.is_empty():
        return ""
    causes = ", ".join(f"{n} {cause}" for cause, n in lost["cause"].value_counts(sort=True).rows())
    return f"{len(lost)} lost ({causes})"
