"""The weights by which a run draws its problems: a number in SQL of what the run has seen of each problem."""

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.sql_query import WEIGHT_EXAMPLE, check_weight, refuse_changing, run_query
from rollmill.tasks.store.run.problem_history import Floats

WEIGHT = "rollout.problem_weight"
# What a weight is tried on before a run: a problem without a visit, and one with a group without a reward.
_TRIED = pl.DataFrame(
    {
        "problem": [0, 1, 2],
        "visits": [0, 1, 2],
        "reward": [None, None, 0.5],
        "reward_std": [None, None, 0.5],
        "tokens": [None, None, 100.0],
        "steps_ago": [None, 3, 1],
    },
)


def check_problem_weight(weight: str) -> None:
    """Refuse a weight of problems that is wrong for a problem without visits, or for one with them; empty: there is none.

    Raises:
        ConfigError: names the setting, the problem and the value.
    """
    if weight:
        refuse_changing(WEIGHT, weight, WEIGHT_EXAMPLE)
        weigh_problems(weight, _TRIED)


def weigh_problems(weight: str, problems: pl.DataFrame) -> Floats:
    """Return the weight of each problem; raises ConfigError for one that is no number of at least 0."""
    query = f"select ({weight}\n)::double as weight, problem, visits from problems order by problem"
    found = run_query(WEIGHT, weight, query, {"problems": problems.lazy})
    if found.columns != ["weight", "problem", "visits"]:
        raise ConfigError(WEIGHT, weight, "give one number")
    is_right = pl.col("weight").is_finite() & (pl.col("weight") >= 0)
    for value, problem, visits in found.filter(~is_right.fill_null(False)).head(1).iter_rows():
        check_weight(WEIGHT, weight, value, f"problem {problem}, which has {visits} visits so far")
    return found["weight"].to_numpy()
