"""The tables of `rollmill inspect`: a run's data sets, aggregated with Polars."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rollmill.tasks.errors import ShardError
from rollmill.tasks.look.tables.selection import Selection, check_known, scan_partitions, select_partitions
from rollmill.tasks.look.tables.trajectory_table import make_trajectories_view
from rollmill.tasks.look.tables.view import Column, View, count_noun, drop_uniform, limit_notes, order_rows
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.attempts import last_attempts
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.held_out_counts import count_held_out
from rollmill.tasks.store.reader import Scan, list_steps, scan
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest
from rollmill.tasks.store.run.step_settings import describe_setting_changes, list_setting_changes

FULL_REWARD = 1.0
TRAINED = "trained"
"""Outcome of a group that is trained on; other groups have the reason why not."""

STEP_COLUMNS = (
    Column("step"),
    Column("groups", rank=3),
    Column("groups_trained", rank=5, header="trained"),
    Column("replayed", rank=5, header="stored"),
    Column("survived", rank=4),
    Column("lost", rank=2),
    Column("reward"),
    Column("tokens", rank=1, digits=1),
    Column("seconds", rank=6, digits=1),
)
OF_ALL_ENVIRONMENTS = ("lost", "seconds", "replayed")
"""Columns of a step that are measured over all environments together."""
GROUP_COLUMNS = (
    Column("group"),
    Column("step", rank=6),
    Column("env", rank=5),
    Column("expected", rank=4),
    Column("survived", rank=1),
    Column("reward_mean", header="reward"),
    Column("reward_std", rank=2, header="std"),
    Column("tokens_mean", rank=3, header="tokens", digits=1),
    Column("duration_s", rank=7, header="seconds", digits=1),
    Column("reason", is_text=True),
)
VERSION_COLUMNS = (
    Column("step", header="version"),
    Column("env"),
    Column("n", rank=1, header="problems"),
    Column("samples", rank=3, header="k"),
    Column("reward", header="reward, sampled"),
    Column("reward_low", rank=2, header="from"),
    Column("reward_high", rank=2, header="to"),
    Column("greedy_accuracy", header="accuracy, greedy"),
    Column("greedy_accuracy_low", rank=2, header="from"),
    Column("greedy_accuracy_high", rank=2, header="to"),
    Column("pass_at_k", rank=3, header="pass@k, sampled"),
    Column("pass_at_k_low", rank=4, header="from"),
    Column("pass_at_k_high", rank=4, header="to"),
)
OF_SEVERAL_SAMPLES = ("samples", "pass_at_k", "pass_at_k_low", "pass_at_k_high")
"""Columns of a version that are not shown with one sampled answer to each problem."""
Z = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution: intervals are of 95 %."""
MIN_NORMAL = 30
"""Fewer values have a mean whose distribution is too far from normal for an interval by its standard error."""


def select_view(folder: RunFolder, selection: Selection) -> View:
    """Return the table that `rollmill inspect` shows: trajectories, groups, steps, or held-out rewards by policy version.

    Raises:
        ConfigError: the run has no such step, group, scorer, environment, status or column; the error lists what it has.
    """
    selection.check()
    level = selection.resolved_level
    if level == "trajectories":
        return make_trajectories_view(folder, selection)
    if selection.evaluations:
        return make_versions_view(folder, selection)
    return make_groups_view(folder, selection) if level == "groups" else make_run_view(folder, selection)


def make_run_view(folder: RunFolder, selection: Selection | None = None, scan: Scan = scan) -> View:
    """Return the table of steps with totals of the run; columns measured over all environments are left out for a single one."""
    selection = selection or Selection()
    manifest = read_manifest(folder)
    trains, changes = manifest.trains, list_setting_changes(manifest.earlier_settings, manifest.config)
    metrics = _read_step_metrics(folder, scan, trains=trains)
    env = selection.env
    rows = last_attempts(scan(folder, "rollouts", ["group", "sample", "attempt", "status", "env"]))
    rows = rows.filter(pl.lit(not env) | (pl.col("env") == env))
    by_status = dict(rows.group_by("status").len().sort("status").collect().rows())
    steps = _read_steps(folder, selection, scan).join(metrics, on="step", how="left", maintain_order="left")
    columns: Sequence[Column] = STEP_COLUMNS
    if env:
        steps = steps.drop(OF_ALL_ENVIRONMENTS)
        columns = [column for column in columns if column.name not in OF_ALL_ENVIRONMENTS]
    shown = _order_and_limit(steps, columns, selection)
    n_done = len(metrics)
    values: dict[str, object] = {
        "run": folder.location,
        "steps": n_done,
        "trajectories": sum(by_status.values()),
        "by_status": by_status,
        "held_out": read_held_out(folder, env, scan=scan).to_dicts(),
        "policy_version": n_done if trains else 0,
        "setting_changes": [{"step": step, "changes": lines} for step, lines in changes.items()],
        "by_step": shown,
    }
    counts = ", ".join(f"{n} {status}" for status, n in by_status.items())
    n_sampled = count_noun(sum(by_status.values()), "trajectory", "trajectories")
    of_env = env and f" of {env}"
    title = f"{folder.location}: {count_noun(n_done, 'step')} {'trained' if trains else 'collected'}, {n_sampled}{of_env}"
    notes = [
        *limit_notes(len(shown), len(steps)),
        *describe_setting_changes(manifest.earlier_settings, manifest.config),
    ]
    columns = drop_uniform(columns, shown, (), [each.name for each in columns if each.name == "replayed"])
    return View(values, f"{title}{counts and f' ({counts})'}", columns, shown, notes)


def make_groups_view(folder: RunFolder, selection: Selection) -> View:
    """Return the table of the selected groups."""
    steps = select_partitions(folder, "groups", "step", selection.steps)
    groups = select_groups(folder, selection, steps)
    shown = _order_and_limit(groups, GROUP_COLUMNS, selection)
    return View(
        {"step": steps[0] if steps and len(steps) == 1 else None, "n": len(groups), "groups": shown},
        f"{count_noun(len(groups), 'group')}{_describe_steps(steps)}",
        drop_uniform(GROUP_COLUMNS, shown, ("step", "env")),
        shown,
        limit_notes(len(shown), len(groups), "no group matches"),
    )


def select_groups(
    folder: RunFolder, selection: Selection, steps: list[int] | None, scan: Scan = scan
) -> pl.DataFrame:
    """Return the selected groups by step and number (`steps` None: of all steps); raises ConfigError like `select_view`."""
    names = [column.name for column in GROUP_COLUMNS]
    groups = scan_partitions(folder, "groups", [*names, "subgroup"], "step", steps, scan).collect()
    if selection.env:
        check_known("--env", selection.env, groups["env"])
        groups = groups.filter(pl.col("env") == selection.env)
    fate = pl.col("reason").replace("", TRAINED)
    for status in selection.status:
        check_known("--status", status, groups.select(fate)["reason"])
    if selection.status:
        groups = groups.filter(fate.is_in(selection.status))
    if selection.reward:
        groups = groups.filter(pl.col("reward_mean").is_between(selection.reward.low, selection.reward.high))
    if selection.group is not None:
        groups = groups.filter(pl.col("group") == selection.group)
    return groups.sort("step", "group", "subgroup")


def make_versions_view(folder: RunFolder, selection: Selection) -> View:
    """Return the table of held-out mean reward and greedy accuracy by policy version."""
    if selection.env:
        check_known("--env", selection.env, scan(folder, "evaluations", ["env"]).collect()["env"])
    frame = _read_versions(folder, selection.env)
    if asked := select_partitions(folder, "evaluations", "version", selection.steps):
        frame = frame.filter(pl.col("step").is_in(asked))
    shown = _order_and_limit(frame, VERSION_COLUMNS, selection)
    title = f"{folder.location}: held out{selection.env and f', {selection.env}'}, with 95 % intervals"
    columns = drop_uniform(VERSION_COLUMNS, shown, ("env",))
    if frame["samples"].eq(1).all():
        columns = [column for column in columns if column.name not in OF_SEVERAL_SAMPLES]
    return View({"held_out": shown}, title, columns, shown, limit_notes(len(shown), len(frame)))


def _read_versions(folder: RunFolder, env: str) -> pl.DataFrame:
    """Return the held-out table: of one environment; or of all together, after them those of each if there are several."""
    by_env = read_held_out_by_env(folder)
    if env:
        return by_env.filter(pl.col("env") == env)
    if by_env["env"].n_unique() < 2:
        return by_env
    whole = read_held_out(folder).with_columns(pl.lit(ALL).alias("env")).select(by_env.columns)
    return pl.concat([whole, by_env]).sort("step", maintain_order=True)


def read_held_out(
    folder: RunFolder, env: str = "", version: int | None = None, scan: Scan = scan
) -> pl.DataFrame:
    """Read each complete evaluation, oldest first, over all environments or of one.

    Columns are step (policy version), n (problems), samples (sampled answers to each problem, k), reward (mean over problems of the
    mean of their k sampled answers, avg@k), greedy_accuracy, and pass_at_k: the share of problems of which a sampled answer has the
    full reward; null where environments differ in k. These have the bounds of a 95 % interval, `_low` and `_high`: a share's by
    Wilson's score (Wilson, Probable Inference, 1927), and so that of a mean of rewards 0 and 1; another mean's by its standard error,
    null with fewer than 30 problems, for which the mean is not nearly normal. A trajectory that could not be scored counts as reward
    0; accuracy is the share of full rewards (1).
    """
    return _read_held_out(folder, version, scan, env=env, by=()).sort("step").collect()


def read_held_out_by_env(folder: RunFolder, version: int | None = None, scan: Scan = scan) -> pl.DataFrame:
    """Read each complete evaluation of each environment: a column env, and those of `read_held_out`."""
    return _read_held_out(folder, version, scan, by=("env",)).sort("step", "env").collect()


def list_held_out(folder: RunFolder) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of `read_held_out` under "all" if there are any, and those of each environment if there are several."""
    whole = read_held_out(folder).to_dicts()
    by_env = read_held_out_by_env(folder)
    names = by_env["env"].unique().sort().to_list()
    each = [(env, by_env.filter(pl.col("env") == env).to_dicts()) for env in names] if len(names) > 1 else []
    return [(ALL, whole), *each] if whole else []


def _read_held_out(
    folder: RunFolder, version: int | None, scan: Scan, *, env: str = "", by: Sequence[str]
) -> pl.LazyFrame:
    sampled, greedy = pl.col("greedy").not_(), pl.col("greedy")
    # A full reward that is a sum of parts may be a little less than 1.
    is_right = pl.col("reward") >= FULL_REWARD - 1e-9
    n_rows = sum(count_held_out(read_manifest(folder).config).values())
    partition = {} if version is None else {"version": version}
    rows = (
        scan(folder, "evaluations", ["policy_version", "env", "group", "greedy", "reward"], **partition)
        .with_columns(pl.col("reward").fill_nan(0.0))
        # An evaluation that was interrupted has fewer rows than a greedy answer and the sampled ones to each prompt.
        .with_columns(pl.len().over("policy_version").alias("n_rows"))
        .filter((pl.col("n_rows") == n_rows) & (pl.lit(not env) | (pl.col("env") == env)))
    )
    by_prompt = rows.group_by(pl.col("policy_version").cast(pl.Int64).alias("step"), *by, "group").agg(
        sampled.sum().cast(pl.Int64).alias("samples"),
        pl.col("reward").filter(sampled).mean(),
        is_right.filter(greedy).any().alias("greedy"),
        is_right.filter(sampled).any().alias("pass"),
    )
    passed = _share_with_interval("pass_at_k", pl.col("pass"))
    is_same = pl.col("samples").min() == pl.col("samples").max()
    return by_prompt.group_by("step", *by).agg(
        pl.len().cast(pl.Int64).alias("n"),
        pl.col("samples").max(),
        *mean_with_interval(pl.col("reward")),
        *_share_with_interval("greedy_accuracy", pl.col("greedy")),
        *(pl.when(is_same).then(each).alias(each.meta.output_name()) for each in passed),
    )


def mean_with_interval(rewards: pl.Expr, name: str = "reward") -> list[pl.Expr]:
    """Return the mean of rewards, and the bounds `_low` and `_high` of its 95 % interval as in `read_held_out`."""
    mean = rewards.mean()
    half = Z * rewards.std() / rewards.len().sqrt()
    has_bounds = (rewards.len() >= MIN_NORMAL) & half.is_finite() & (half > 0)
    is_share = rewards.is_in([0.0, FULL_REWARD]).all()
    # Equal rewards have a standard error of 0, which is no certainty.
    by_error = [pl.when(has_bounds).then(bound) for bound in (mean - half, mean + half)]
    by_score = _share_with_interval(name, rewards)[1:]
    bounds = [
        pl.when(is_share).then(score).otherwise(error)
        for score, error in zip(by_score, by_error, strict=True)
    ]
    return [mean.alias(name), bounds[0].alias(f"{name}_low"), bounds[1].alias(f"{name}_high")]


def _share_with_interval(name: str, is_right: pl.Expr) -> list[pl.Expr]:
    share, n = is_right.mean(), is_right.len().cast(pl.Float64)
    centre, scale = share + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * (share * (1 - share) / n + Z**2 / (4 * n**2)).sqrt()
    bounds = [((centre - half) / scale).alias(f"{name}_low"), ((centre + half) / scale).alias(f"{name}_high")]
    return [share.alias(name), *bounds]


def format_with_interval(row: Mapping[str, Any], name: str) -> str:
    """Format a value of `read_held_out` with its interval. Example: "0.463 (0.410 to 0.515)"."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:z.3f}" + ("" if low is None else f" ({low:z.3f} to {high:z.3f})")


def _read_steps(folder: RunFolder, selection: Selection, scan: Scan) -> pl.DataFrame:
    steps = select_partitions(folder, "groups", "step", selection.steps)
    columns = ["step", "group", "env", "survived", "reward_mean", "tokens_mean", "reason"]
    groups = scan_partitions(folder, "groups", columns, "step", steps, scan).collect()
    if selection.env:
        check_known("--env", selection.env, groups["env"])
        groups = groups.filter(pl.col("env") == selection.env)
    return (
        groups.group_by("step")
        .agg(
            pl.col("group").n_unique().alias("groups"),
            pl.col("survived").sum(),
            pl.col("reward_mean").drop_nans().mean().alias("reward"),
            pl.col("tokens_mean").drop_nans().mean().alias("tokens"),
            pl.col("group").filter(pl.col("reason") == "").n_unique().alias("groups_trained"),
        )
        .sort("step")
    )


def _read_step_metrics(folder: RunFolder, scan: Scan, *, trains: bool) -> pl.DataFrame:
    """Return columns step, lost (trajectories), seconds and replayed (stored groups in the batch) for each finished step."""
    wanted = {
        "lost": "drops/trajectories",
        "seconds": "time/step_s",
        "replayed": "rollout/replayed_groups",
    }
    value = pl.col("value").filter
    return (
        scan(folder, "metrics", ["step", "name", "env", "value"])
        .filter(pl.col("env") == ALL)
        .group_by("step")
        .agg(
            (pl.col("name") == ("train/updated" if trains else wanted["seconds"])).any().alias("done"),
            *(value(pl.col("name") == name).last().alias(short) for short, name in wanted.items()),
        )
        .filter("done")
        .drop("done")
        .with_columns(pl.col("lost", "replayed").cast(pl.Int64))
        .collect()
    )


def _order_and_limit(
    frame: pl.DataFrame, columns: Sequence[Column], selection: Selection
) -> Sequence[Mapping[str, object]]:
    """Return the table's rows as dicts, sorted and limited in number as `selection` says."""
    return order_rows(frame, columns, selection.sort, selection.limit or 0).to_dicts()


def _describe_steps(steps: list[int] | None) -> str:
    if steps is None:
        return ""
    return f" of step {steps[0]}" if len(steps) == 1 else f" of steps {steps[0]} to {steps[-1]}"


def check_rollouts(folder: RunFolder) -> None:
    """Refuse a run with groups of a step and no rollouts of it; ShardError names the steps.

    A run that trains on the rollouts of others has none.
    """
    if not has_manifest(folder) or (read_manifest(folder).sources and not list_steps(folder, "plans")):
        return
    if gone := sorted(set(list_steps(folder, "groups")) - set(list_steps(folder, "rollouts"))):
        raise ShardError(
            f"{folder.dataset('rollouts')}: the rollouts of {count_noun(len(gone), 'step')} are gone, whose groups are stored: "
            f"{name_first(gone)}; restore them from a copy of the run (`rollmill verify` names everything that is missing)"
        )
