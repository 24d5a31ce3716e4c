"""Score stored rollouts twice, in two orders: a scorer whose rewards differ keeps state, or is random."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.store.rows import Rows

COMPARED = ("status", "reward", "subgroup", "turn_rewards", "token_rewards")


@dataclass(frozen=True, slots=True)
class OrderTrial:
    """Scores of some trajectories by fresh scorers, in two orders.

    Attributes:
        forward, backward: rows of `scores` by trajectory id, with the columns COMPARED.
    """

    forward: Mapping[str, Mapping[str, object]]
    backward: Mapping[str, Mapping[str, object]]

    def find_difference(self) -> tuple[str, object, object] | None:
        """Return the first trajectory whose scores differ, and both rewards; None if there is none."""
        return find_difference(self.forward, self.backward)


async def try_orders(config: ScoreConfig, groups: Sequence[Rows], env_variables: Sequence[str]) -> OrderTrial:
    """Score groups of rollouts from first to last, then from last to first by a new scorer in a new process.

    Args:
        config: names the scorer.
        groups: scorable rows of one group each.
        env_variables: as for `Scoring`.
    """
    # One worker, so that all calls meet the same state.
    config = config.model_copy(update={"workers": 1, "max_in_flight": 1})
    turned = [rows.take(list(reversed(range(rows.num_rows)))) for rows in reversed(groups)]
    forward, backward = [await _score(config, each, env_variables) for each in (groups, turned)]
    return OrderTrial(forward, backward)


async def _score(
    config: ScoreConfig, groups: Sequence[Rows], env_variables: Sequence[str]
) -> dict[str, Mapping[str, object]]:
    async with Scoring(config, run="", env_variables=env_variables) as scoring:
        scored = [await scoring.score(rows, step=0) for rows in groups]
    return {row["trajectory_id"]: row for rows in scored for row in select_compared(rows).to_pylist()}


def select_compared(scores: Rows) -> Rows:
    """Select the columns of `scores` that are compared, and the trajectory id."""
    return scores.select(["trajectory_id", *COMPARED])


def find_difference(
    first: Mapping[str, Mapping[str, object]], second: Mapping[str, Mapping[str, object]]
) -> tuple[str, object, object] | None:
    """Return the first trajectory whose scores differ, and both rewards; None if there is none.

    A failed score says nothing about the reward. Trajectories that one side lacks are not compared.

    Example: {"r.0.1": {"reward": 1.0, ...}} and {"r.0.1": {"reward": 0.5, ...}} give ("r.0.1", 1.0, 0.5).
    """
    for trajectory, one in first.items():
        other = second.get(trajectory)
        if other is None or "failed" in (one["status"], other["status"]):
            continue
        # By repr, in which NaN equals NaN and 0.0 differs from -0.0.
        if any(repr(one[name]) != repr(other[name]) for name in COMPARED):
            return trajectory, one["reward"], other["reward"]
    return None
