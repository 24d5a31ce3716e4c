"""The stored groups that a live step may train on again, and the choice of some of them by a condition and an order in SQL."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_frames import GROUP_COLUMNS, RunFrames
from rollmill.tasks.look.tables.sql_query import ORDER_EXAMPLE, refuse_changing, run_query
from rollmill.tasks.store.folders import RunFolder

WHERE, ORDER_BY = "rollout.replay.where", "rollout.replay.order_by"
KEY = ("location", "step", "group")
"""Columns by which a stored group is known."""
# What a condition and an order are tried on before a run.
_TRIED = pl.DataFrame(
    [
        {"location": "runs/a", "run": "a", "step": 0, "group": 0}
        | dict.fromkeys(("env", "example_id"), "")
        | dict.fromkeys(("n", "n_scored", "versions_behind", "steps_ago", "replays"), 1)
        | dict.fromkeys(("reward", "reward_std", "reward_min", "reward_max", "tokens"), 0.5)
    ]
)


def check_choice(where: str, order_by: str) -> None:
    """Refuse a condition or an order that is wrong for the columns of stored groups; empty: there is none.

    Raises:
        ConfigError: names the setting.
    """
    if where:
        refuse_changing(WHERE, where)
    if order_by:
        refuse_changing(ORDER_BY, order_by, ORDER_EXAMPLE)
    choose_groups(_TRIED, where, order_by, [0])


def read_stored_groups(folder: RunFolder, scorer: str, step: int | None = None) -> pl.DataFrame:
    """Read the groups of a run, or of one of its steps, that can be corrected for the policy that sampled them.

    The log-probabilities of an imported trajectory's sampler are not known: its group is left out.

    Columns are location, run, step, group and those of GROUP_COLUMNS, rewards by the scorer NAME@VERSION.
    """
    groups = RunFrames([folder], scorer, step).list_groups()
    return groups.filter("is_sampled").drop("is_sampled")


def choose_groups(groups: pl.DataFrame, where: str, order_by: str, seed: Sequence[int]) -> pl.DataFrame:
    """Return the KEY of the groups that meet a condition, in an order in SQL, or at random if there is none.

    The same arguments give the same groups; those that are equal in the order are sorted by their KEY.

    Args:
        groups: rows with the columns of `read_stored_groups`, steps_ago and replays.
        where: condition; empty: all.
        order_by: keys; empty: a random order.
        seed: of the random order.

    Raises:
        ConfigError: the condition or the order is wrong.
    """
    chosen = _query(groups, WHERE, where, f"where ({where}\n) order by all") if where else groups.select(KEY)
    if order_by:
        kept = groups.join(chosen, on=KEY, how="semi")
        return _query(kept, ORDER_BY, order_by, f'order by {order_by}\n, location, step, "group"')
    return chosen.sort(KEY)[np.random.default_rng(seed).permutation(len(chosen))]


def _query(groups: pl.DataFrame, field: str, given: str, rest: str) -> pl.DataFrame:
    query = f'select location, step, "group" from stored_groups {rest}'
    found = run_query(field, given, query, {"stored_groups": groups.lazy})
    if found.columns != list(KEY):
        raise ConfigError(field, given, f"give an expression with the columns {', '.join(GROUP_COLUMNS)}")
    return found
