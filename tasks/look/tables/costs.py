"""What each trajectory cost: seconds of servers, of the trainer's ranks and of scorers; and what no trajectory used."""

import polars as pl

from rollmill.tasks.look.ledger.server_shares import GENERATING
from rollmill.tasks.look.ledger.span_timeline import FLOW, IDLE, NO_SPANS, RANK, SECOND_US, UNATTRIBUTED
from rollmill.tasks.look.ledger.step_attribution import Ledger

TRAINED, EVALUATION, SAMPLED_AGAIN, OPEN = "trained", "evaluation", "sampled again", "step not ended"
"""Fates of trajectories; the others are the reason why the group is not in the batch, or a status."""
WEIGHTS, CHECKPOINTS, UNKNOWN, OTHER = "(weights)", "(checkpoints)", "(no span)", "(other)"
"""What servers and ranks did for no trajectory, besides `(idle)`."""

SCHEMA = pl.Schema(
    {
        "step": pl.Int32(),
        "trajectory": pl.String(),
        "env": pl.String(),
        "example_id": pl.String(),
        "fate": pl.String(),
        "n_completion_tokens": pl.Int64(),
        "server_s": pl.Float64(),
        "trainer_s": pl.Float64(),
        "scorer_s": pl.Float64(),
    }
)
"""Columns of costs. A row without a trajectory has what servers and ranks did for none."""
_KNOWN = pl.Schema(
    {
        "step": pl.Int32(),
        "lane": pl.String(),
        "trajectory_id": pl.String(),
        "env": pl.String(),
        "example_id": pl.String(),
        "fate": pl.String(),
        "n_completion_tokens": pl.Int64(),
        "n_tokens": pl.Int64(),
    }
)
"""What is stored of a trajectory, by its lane in the spans; n_tokens is null where it is not known."""
_LEAST_S = 1e-3
"""Seconds below which a difference of two sums is rounding."""
ROLLOUT_COLUMNS = (
    "step", "group", "sample", "attempt", "trajectory_id", "env", "example_id", "status", "n_prompt_tokens", "n_completion_tokens"
)  # fmt: skip
_PURPOSES = {
    "receiving": WEIGHTS,
    "loading": WEIGHTS,
    "switching": WEIGHTS,
    "waiting_for_trainer": WEIGHTS,
    "parity": WEIGHTS,
    "gathering": WEIGHTS,
    "sending": WEIGHTS,
    "waiting_for_receiver": WEIGHTS,
    "checkpointing": CHECKPOINTS,
    "exporting": CHECKPOINTS,
    IDLE: "(idle)",
    UNATTRIBUTED: UNKNOWN,
    NO_SPANS: UNKNOWN,
}
"""What a span of a server or rank is for, by its name, where that is no trajectory."""
_TRAINING = ("reading_batch", "recomputing", "packing", "forward", "backward", "optimizer", "annotating", "measuring", "waiting_for_rank")  # fmt: skip
"""Spans of a rank that are for the trajectories of the step's batch."""


def measure_costs(
    ledger: Ledger,
    rollouts: pl.LazyFrame,
    trajectories: pl.LazyFrame,
    batches: pl.LazyFrame,
    evaluations: pl.LazyFrame,
) -> pl.DataFrame:
    """Return what each trajectory cost in the time of the ledger's steps.

    Servers and ranks: all their seconds in these steps, so that the sums of server_s and trainer_s are the steps' seconds times
    the number of servers, and of ranks. While a server answers n requests, each has 1 / n of its time. The seconds that ranks
    train are shared by the rows of the step's batch in proportion to their tokens; rows of other runs and steps have the mean number of tokens.
    Scorers run in many ways, so scorer_s adds up to no processes: it is the time that each score took, a group's score shared
    evenly.

    Args:
        ledger: the time of some steps.
        rollouts: data set; every attempt.
        trajectories: the frame of `RunFrames`; the last attempt of each.
        batches: data set.
        evaluations: data set.

    Returns:
        Rows with SCHEMA: one for each trajectory, and for each step those without a trajectory.
    """
    # Spans of the steps around show requests that overlap these steps; others have no time in them.
    used = ledger.server_shares.filter(pl.col("us") > 0)
    lanes = used.group_by("lane").agg(server_s=pl.col("us").sum() / SECOND_US)
    steps = ledger.steps["step"].to_list()
    sampled = _list_sampled(steps, lanes, rollouts, trajectories)
    replayed = _list_rest_of_batches(steps, batches, sampled)
    known = pl.concat([sampled, replayed, _list_held_out(lanes, evaluations)])
    costs = known.join(lanes, on="lane", how="left", maintain_order="left")
    for more in (_share_training(ledger, known, batches), _measure_scoring(ledger, known)):
        costs = costs.join(more, on="lane", how="left", maintain_order="left")
    costs = costs.with_columns(pl.col("server_s", "trainer_s", "scorer_s").fill_null(0.0))
    found = costs.rename({"lane": "trajectory"}).select(SCHEMA.names()).cast(SCHEMA)
    return pl.concat([found, _list_unused(ledger, found)]).sort("step", "trajectory", "fate", nulls_last=True)


def find_fate() -> pl.Expr:
    """Return what became of a trajectory, from the columns of the view `trajectories`."""
    # One that is scored, of a group in the batch, and not trained on was truncated (score.train_truncated).
    unless_scored = pl.when(pl.col("score_status") != "scored").then("score_status")
    return (
        pl.when(pl.col("advantage").is_not_null())
        .then(pl.lit(TRAINED))
        .when(pl.col("group_reason").is_null())
        .then(pl.lit(OPEN))
        .when(pl.col("group_reason") != "")
        .then("group_reason")
        .otherwise(pl.coalesce(unless_scored, "status"))
    )


def _list_sampled(
    steps: list[int], lanes: pl.DataFrame, rollouts: pl.LazyFrame, trajectories: pl.LazyFrame
) -> pl.DataFrame:
    """Return the run's rollouts with the columns of `_KNOWN`: those of the steps, and others that servers answered meanwhile."""
    place = pl.format("{}.{}", "group", "sample")
    lane = pl.when(pl.col("attempt") == 0).then(place).otherwise(pl.format("{}.{}", place, "attempt"))
    fates = trajectories.select("trajectory_id", fate=find_fate()).collect()
    tokens = pl.col("n_prompt_tokens") + pl.col("n_completion_tokens")
    found = (
        rollouts.select(ROLLOUT_COLUMNS)
        .collect()
        .unique("trajectory_id", maintain_order=True)
        .join(fates, on="trajectory_id", how="left", maintain_order="left")
        .with_columns(lane=lane, fate=pl.col("fate").fill_null(SAMPLED_AGAIN), n_tokens=tokens)
    )
    is_used = pl.col("step").is_in(steps) | pl.col("lane").is_in(lanes["lane"].implode())
    return found.filter(is_used).select(_KNOWN.names()).cast(_KNOWN)


def _list_rest_of_batches(steps: list[int], batches: pl.LazyFrame, sampled: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the steps' batches that other runs or steps sampled, with the columns of `_KNOWN`."""
    is_known = pl.col("trajectory_id").is_in(sampled["trajectory_id"].implode())
    found = batches.filter(pl.col("step").is_in(steps) & ~is_known).select(
        "step",
        "trajectory_id",
        "env",
        lane="trajectory_id",
        example_id=pl.lit(""),
        fate=pl.lit(TRAINED),
        n_completion_tokens=pl.lit(None, pl.Int64),
        n_tokens=pl.lit(None, pl.Int64),
    )
    once = found.collect().unique("trajectory_id", keep="first", maintain_order=True)
    return once.select(_KNOWN.names()).cast(_KNOWN)


def _list_held_out(lanes: pl.DataFrame, evaluations: pl.LazyFrame) -> pl.DataFrame:
    """Return the held-out answers that servers gave meanwhile, with the columns of `_KNOWN`."""
    found = evaluations.select(
        pl.col("policy_version").alias("step"),
        "trajectory_id",
        "env",
        "example_id",
        "n_completion_tokens",
        lane=pl.col("trajectory_id").str.replace(r"^[^.]*\.", ""),
        fate=pl.lit(EVALUATION),
        n_tokens=pl.lit(0),
    ).collect()
    is_used = pl.col("lane").is_in(lanes["lane"].implode())
    return found.unique("lane").filter(is_used).select(_KNOWN.names()).cast(_KNOWN)


def _share_training(ledger: Ledger, known: pl.DataFrame, batches: pl.LazyFrame) -> pl.DataFrame:
    """Return columns lane and trainer_s: the seconds that ranks trained, shared by the rows of each step's batch."""
    rows = batches.select("step", "trajectory_id").filter(
        pl.col("step").is_in(ledger.steps["step"].to_list())
    )
    tokens = pl.col("n_tokens").cast(pl.Float64)
    mean = pl.coalesce(tokens.mean().over("step"), 1.0)
    weighed = (
        rows.collect()
        .join(known.select("trajectory_id", "lane", "n_tokens"), on="trajectory_id", maintain_order="left")
        .with_columns(weight=pl.coalesce(tokens, mean))
    )
    seconds = _list_training(ledger).group_by("step").agg(pl.col("us").sum() / SECOND_US)
    share = pl.col("us") * pl.col("weight") / pl.col("weight").sum().over("step")
    shared = weighed.join(seconds, on="step").select("lane", trainer_s=share)
    return shared.group_by("lane").agg(pl.col("trainer_s").sum())


def _list_training(ledger: Ledger) -> pl.DataFrame:
    """Return the rows of the ledger's owners in which a rank trained."""
    is_rank = pl.col("process").str.starts_with(RANK)
    return ledger.owners.filter(is_rank & pl.col("name").is_in(_TRAINING))


def _measure_scoring(ledger: Ledger, known: pl.DataFrame) -> pl.DataFrame:
    """Return columns lane and scorer_s: the seconds that each trajectory's scores took; a group's score is shared evenly.

    A group has a span of scoring also where its trajectories are scored one by one: the spans of the trajectories count then.
    """
    scored = (
        ledger.episodes.filter(pl.col("name") == "scoring")
        .with_columns(pl.col("lane").str.replace(r"/.*$", ""), us=pl.col("end") - pl.col("start"))
        .group_by("lane")
        .agg(scorer_s=pl.col("us").sum() / SECOND_US)
    )
    group = pl.col("lane").str.extract(r"^(\d+)\.")
    one_by_one = scored.select(group.alias("group")).drop_nulls()
    of_group = known.with_columns(group=group).join(one_by_one, on="group", how="anti")
    share = pl.col("scorer_s") / pl.len().over("group")
    of_groups = of_group.join(scored, left_on="group", right_on="lane").select("lane", scorer_s=share)
    return pl.concat([scored, of_groups]).group_by("lane").agg(pl.col("scorer_s").sum())


def _list_unused(ledger: Ledger, used: pl.DataFrame) -> pl.DataFrame:
    """Return, by step and purpose, what servers and ranks did for no trajectory that `used` has.

    Generating, and training, of which `used` has less than the processes did, are of purpose OTHER.
    """
    is_rank = pl.col("process").str.starts_with(RANK)
    own = ledger.owners.filter(pl.col("process") != FLOW).with_columns(
        fate=pl.col("name").replace_strict(_PURPOSES, default=OTHER, return_dtype=pl.String),
        is_used=(is_rank & pl.col("name").is_in(_TRAINING)) | (~is_rank & (pl.col("name") == GENERATING)),
    )
    seconds = pl.col("us") / SECOND_US
    unused = (
        own.filter(~pl.col("is_used"))
        .group_by("step", "fate")
        .agg(server_s=seconds.filter(~is_rank).sum(), trainer_s=seconds.filter(is_rank).sum())
    )
    # Requests overlap steps, so what is left of them is known for all steps together.
    whole = own.filter("is_used").select(
        server_s=seconds.filter(~is_rank).sum(), trainer_s=seconds.filter(is_rank).sum()
    )
    left = whole - used.select(pl.col("server_s", "trainer_s").sum())
    rest = left.select(step=pl.lit(None), fate=pl.lit(OTHER), server_s="server_s", trainer_s="trainer_s")
    rest = rest.filter(pl.max_horizontal("server_s", "trainer_s") > _LEAST_S)
    every = pl.concat([unused, rest.cast(unused.schema)])
    return every.select(
        pl.col(name) if name in every.columns else pl.lit(0.0 if name == "scorer_s" else None).alias(name)
        for name in SCHEMA.names()
    ).cast(SCHEMA)
