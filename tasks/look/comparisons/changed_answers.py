"""How the greedy answers to held-out problems differ between two policy versions of a run."""

from dataclasses import dataclass

import polars as pl

from rollmill.tasks.look.tables.run_tables import FULL_REWARD
from rollmill.tasks.look.tables.trajectory_table import add_messages
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.schemas import SCORABLE_STATUSES

N_EXAMPLES = 3

IS_UNSCORED = pl.col("status").is_in(SCORABLE_STATUSES) & pl.col("reward").is_nan()
"""The scorer failed on the answer, or dropped it: nobody knows whether it is right."""


@dataclass(frozen=True, slots=True)
class ChangedAnswers:
    """Counts of problems whose greedy answer turned right or wrong, and examples of the first.

    Attributes:
        gained: problems answered right by the later version only.
        lost: problems answered right by the earlier version only.
        examples: (problem, earlier answer, later answer) of at most `N_EXAMPLES` gained problems, in the order of the evaluation.
    """

    gained: int
    lost: int
    examples: tuple[tuple[str, str, str], ...]


def compare_answers(folder: RunFolder, env: str, first: int, last: int) -> ChangedAnswers:
    """Compare the greedy answers of two evaluated policy versions, in one environment or in "all" together.

    A problem is left out if one of its answers was not scored.
    """
    before, after = (_read_greedy(folder, env, version) for version in (first, last))
    both = before.join(after, on=["env", "group", "example_id"], suffix="_after", maintain_order="left")
    turned_right = both.filter(~pl.col("is_right") & pl.col("is_right_after"))
    chosen = turned_right.head(N_EXAMPLES)
    later = chosen.select(
        pl.col("trajectory_id_after").alias("trajectory_id"), pl.col("step_after").alias("step")
    )
    conversations = [
        [each["messages"] for each in add_messages(folder, rows, is_held_out=True)]
        for rows in (chosen, later)
    ]
    examples = tuple(
        (_problem(old), _answer(old), _answer(new)) for old, new in zip(*conversations, strict=True)
    )
    lost = both.filter(pl.col("is_right") & ~pl.col("is_right_after"))
    return ChangedAnswers(len(turned_right), len(lost), examples)


def count_unscored(folder: RunFolder, env: str, version: int) -> int:
    """Return how many held-out answers of a policy version could be scored and have no reward, in one environment or in "all"."""
    return len(_scan_answers(folder, env, version).filter(IS_UNSCORED).collect())


def count_failed_scores(folder: RunFolder, env: str, version: int) -> int:
    """Return how many held-out answers of a policy version a scorer failed on; those that it dropped are not counted."""
    failed = IS_UNSCORED & (pl.col("error_type") != "")
    return len(_scan_answers(folder, env, version).filter(failed).collect())


def _read_greedy(folder: RunFolder, env: str, version: int) -> pl.DataFrame:
    rows = _scan_answers(folder, env, version).filter(pl.col("greedy") & ~IS_UNSCORED)
    is_right = pl.col("reward").fill_nan(0.0) >= FULL_REWARD - 1e-9
    return rows.sort("env", "group").with_columns(is_right.alias("is_right")).collect()


def _scan_answers(folder: RunFolder, env: str, version: int) -> pl.LazyFrame:
    names = [
        "trajectory_id",
        "step",
        "env",
        "group",
        "sample",
        "example_id",
        "status",
        "greedy",
        "reward",
        "error_type",
    ]
    rows = scan(folder, "evaluations", names, version=version)
    # An evaluation that was repeated after a kill may have stored a row twice.
    unique = rows.unique(["env", "group", "sample"], keep="last")
    return unique.filter(pl.lit(env == ALL) | (pl.col("env") == env))


def _problem(messages: list[dict[str, str]]) -> str:
    """Return the text of the last message before the policy's first one."""
    given = [each["content"] for each in messages[: _opening(messages)]]
    return str(given[-1]) if given else ""


def _answer(messages: list[dict[str, str]]) -> str:
    """Return what follows the problem: the policy's messages and those of the environment between them."""
    return " ".join(str(each["content"]) for each in messages[_opening(messages) :])


def _opening(messages: list[dict[str, str]]) -> int:
    roles = [each["role"] for each in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)
