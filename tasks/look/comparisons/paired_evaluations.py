"""Two policies on the same held-out prompts: pairs of rewards, and a test with a stated error rate."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import polars as pl

from rollmill.tasks.look.tables.run_tables import MIN_NORMAL, Z
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.held_out_counts import count_held_out
from rollmill.tasks.store.lineage.trained_rows import digest_rows
from rollmill.tasks.store.promotion.gate_record import GateCheck
from rollmill.tasks.store.reader import read, scan
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest

_PROMPT = ("env", "example_id", "example", "greedy")
PROMPT_KEYS = (*_PROMPT, "repeat")
EVALUATION_COLUMNS = ("policy_version", "greedy", "reward", "components")


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Result of a test of paired differences; see `compare_pairs`."""

    low: float
    pass_rate: float
    passed: bool


def compare_pairs(differences: np.ndarray, span: float, margin: float, error_rate: float) -> PairedTest:
    """Test that a candidate is less than `margin` worse: that the mean of paired differences is above -margin.

    The bound `low` is that of Agresti and Min (Statistics in Medicine 24:729, 2005), one-sided: half a pair of each of the four outcomes
    0/0, 0/1, 1/0 and 1/1 is added to the n pairs. With m = sum(d) / (n + 2) and v = (sum(d^2) + span^2) / (n + 2) - m^2 it is
    m - z sqrt(max(v, w) / (n + 2)), z the normal quantile of 1 - error_rate. Here w = margin (span - margin) is the least variance of
    answers that are right or wrong and lose by the margin: rare losses that the pairs happen to lack are no certainty. A candidate that
    is worse by the margin or more passes with a probability of about error_rate at most. An equal one passes with the probability
    `pass_rate` = Phi((margin - z sqrt(max(v, w) / (n + 2))) / sqrt(v / (n + 2))), which grows with the number of prompts.

    Args:
        differences: [n] candidate minus production, one for each prompt.
        span: largest possible difference: 1 for rewards from 0 to 1.
        margin: largest difference that does not matter, above 0.
        error_rate: between 0 and 1.
    """
    z = NormalDist().inv_cdf(1 - error_rate)
    n, mean, variance = _adjust_moments(differences, span)
    error = z * math.sqrt(max(variance, margin * (span - margin)) / n)
    pass_rate = NormalDist().cdf((margin - error) / math.sqrt(variance / n))
    return PairedTest(mean - error, pass_rate, mean - error > -margin)


def compute_paired_interval(differences: np.ndarray, span: float) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean of paired differences, m -+ z sqrt(v / (n + 2)) as in `compare_pairs`; None for few pairs."""
    if len(differences) < MIN_NORMAL:
        return None
    n, mean, variance = _adjust_moments(differences, span)
    half = Z * math.sqrt(variance / n)
    return mean - half, mean + half


def _adjust_moments(differences: np.ndarray, span: float) -> tuple[int, float, float]:
    """Return the number of pairs, the mean and the variance of their differences after the adjustment of Agresti and Min."""
    n = len(differences) + 2
    mean = float(differences.sum()) / n
    return n, mean, (float((differences**2).sum()) + span**2) / n - mean**2


def is_complete(run: RunFolder, version: int) -> bool:
    """Return True if a run has a version's evaluation, with every held-out trajectory."""
    if not has_manifest(run):
        return False
    n_rows: int = read(run, "evaluations", ["trajectory_id"], version=version).num_rows
    return bool(n_rows) and n_rows == sum(count_held_out(read_manifest(run).config).values())


def read_answers(run: RunFolder, version: int) -> pl.DataFrame:
    """Read the mean reward of each prompt of an evaluation: of its greedy answer, and of its sampled ones.

    Columns: those of PROMPT_KEYS, and reward; an answer without a reward counts as 0. `repeat` numbers prompts that are equal.
    """
    return average_answers(
        scan(run, "evaluations", [*_PROMPT, "group", "reward"], version=version), ["reward"]
    )


def average_answers(rows: pl.LazyFrame, rewards: Sequence[str]) -> pl.DataFrame:
    """Average columns of rewards over the rows of each prompt, one for greedy and one for sampled answers, as `read_answers`."""
    return (
        rows.with_columns(pl.col(rewards).fill_nan(0.0).fill_null(0.0))
        .group_by(*_PROMPT, "group")
        .agg(pl.col(rewards).mean())
        .sort("group")
        .collect()
        .with_columns(pl.int_range(pl.len()).over(*_PROMPT).alias("repeat"))
        .drop("group")
    )


def has_same_prompts(first: pl.DataFrame, second: pl.DataFrame) -> bool:
    """Return True if two results of `read_answers` are of the same prompts."""
    return len(first) == len(second) == len(first.join(second, on=PROMPT_KEYS, how="semi"))


def digest_evaluation(run: RunFolder, version: int) -> str:
    """Return the SHA-256, 64 hex digits, of the rows of an evaluation: what was sampled, and the rewards."""
    rows = read(run, "evaluations", version=version).sort_by("trajectory_id")
    digests = digest_rows(rows, rows.select(list(EVALUATION_COLUMNS)))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def make_checks(
    candidate: pl.DataFrame, production: pl.DataFrame | None, margin: float, error_rate: float
) -> list[GateCheck]:
    """Compare two results of `read_answers` of the same prompts: sampled and greedy answers, over all and by environment."""
    joined = candidate.rename({"reward": "a"})
    if production is not None:
        joined = joined.join(production.rename({"reward": "b"}), on=PROMPT_KEYS, maintain_order="left")
    envs = joined["env"].unique().sort().to_list()
    checks = []
    for env in (ALL, *(envs if len(envs) > 1 else ())):
        for greedy in (False, True):
            rows = joined.filter(pl.col("greedy") == greedy, pl.lit(env == ALL) | (pl.col("env") == env))
            if not rows.is_empty():
                checks.append(_check(rows, env, "greedy" if greedy else "sampled", margin, error_rate))
    return checks


def _check(rows: pl.DataFrame, env: str, answers: str, margin: float, error_rate: float) -> GateCheck:
    n, mean = len(rows), float(rows["a"].to_numpy().mean())
    if "b" not in rows.columns:
        return GateCheck(env=env, answers=answers, n=n, candidate=mean)
    a, b = rows["a"].to_numpy(), rows["b"].to_numpy()
    # Rewards of another range than 0 to 1 have larger differences.
    span = max(1.0, float(max(a.max(), b.max()) - min(a.min(), b.min())))
    tested = compare_pairs(a - b, span, margin, error_rate)
    return GateCheck(
        env=env,
        answers=answers,
        n=n,
        candidate=mean,
        production=float(b.mean()),
        difference=float((a - b).mean()),
        low=tested.low,
        pass_rate=tested.pass_rate,
        passed=tested.passed and n >= MIN_NORMAL,
    )


def explain_checks(checks: list[GateCheck], margin: float) -> list[str]:
    """Return why each check that did not pass blocks the candidate, with a remedy."""
    reasons = []
    for each in checks:
        if each.passed or each.difference is None or each.low is None:
            continue
        what = f"{each.answers} reward{'' if each.env == ALL else f' of {each.env}'}"
        said = f"{what}: {each.difference:+.3f} against production"
        if each.n < MIN_NORMAL:
            reasons.append(
                f"{said}, on {each.n} prompts: evaluate at least {MIN_NORMAL} (evaluate.n_prompts)"
            )
        elif each.difference <= -margin:
            reasons.append(f"{said}, the margin is {margin:g}")
        else:
            reasons.append(
                f"{said}, and it may be {each.low:+.3f}, the margin is {margin:g}: worse cannot be excluded; an equal policy passes this check "
                f"with probability {each.pass_rate:.2f}, more prompts (evaluate.n_prompts) raise it"
            )
    return reasons
