"""Credit by turn or by token: rewards at the positions of trajectories, their returns to go, and advantages at equal positions.

A position is a turn, or a sampled token, counted in the order in which they were sampled. Of a group's G trajectories the i-th has K_i
positions with rewards r_i,k. The return to go at a position is

    R_i,k = sum over l >= k of discount^(l - k) r_i,l

and A_i,k is the advantage function over the R_j,k of all trajectories j that have a position k. A position that one trajectory alone has is
not compared with anything: its advantage is 0, unless the function needs no spread.

A reward of a turn counts at its last token, one of a trajectory at its last position, and rewards of tokens add up to that of their turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.advantages import Advantage, differ

Credit: TypeAlias = Literal["trajectory", "turn", "token"]


@dataclass(frozen=True, slots=True)
class PositionRewards:
    """Rewards of one trajectory, and where its turns are.

    Attributes:
        reward: of the trajectory.
        penalty: what its last position gets in addition.
        n_tokens: number of sampled tokens.
        turn_starts: [turns] index of each turn's first token in the row.
        turn_tokens: [turns] sampled tokens of each turn.
        turn_rewards: [turns]; empty: the scorer gave none.
        token_rewards: [n_tokens] in the order in which they were sampled; empty: the scorer gave none.
    """

    reward: float
    n_tokens: int
    turn_starts: Sequence[int] = ()
    turn_tokens: Sequence[int] = ()
    turn_rewards: Sequence[float] = ()
    token_rewards: Sequence[float] = ()
    penalty: float = 0.0

    def at(self, credit: Credit) -> np.ndarray:
        """Return [K] float64 rewards at the trajectory's turns or sampled tokens.

        Example: with turns of 2 and 3 tokens and the turn rewards 1 and .5, those of tokens are [0, 1, 0, 0, .5].
        """
        n = len(self.turn_tokens) if credit == "turn" else self.n_tokens
        given = self.turn_rewards if credit == "turn" else self.token_rewards
        if len(given):
            rewards = np.array(given, np.float64)
        elif len(self.token_rewards):
            turns = np.repeat(np.arange(n), self.turn_tokens)
            rewards = np.bincount(turns, self.token_rewards, n).astype(np.float64)
        elif len(self.turn_rewards) and n:
            rewards = np.zeros(n)
            # A turn of no tokens has its reward at the token before it.
            np.add.at(rewards, np.maximum(np.cumsum(self.turn_tokens) - 1, 0), self.turn_rewards)
        else:
            rewards = np.zeros(n)
            rewards[-1:] = self.reward
        rewards[-1:] += self.penalty
        return rewards

    def spread(self, values: np.ndarray, credit: Credit) -> np.ndarray:
        """Return [n_tokens]: [K] values at turns or sampled tokens for each sampled token, in the row's order.

        The row has its tokens segment by segment, so that a later turn may come before an earlier one.
        """
        order = np.argsort(self.turn_starts, kind="stable")
        if credit == "turn":
            return np.repeat(values[order], np.asarray(self.turn_tokens, np.int64)[order])
        parts = np.split(values, np.cumsum(self.turn_tokens)[:-1])
        return np.concatenate([parts[turn] for turn in order]) if len(order) else values


def returns_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return [G, K] float64: for each position the sum of its reward and the later ones, each discounted by its distance.

    Example: rewards [[1, 0, 2]] with discount .5 give [[1.5, 1, 2]].
    """
    returns, distance = np.array(rewards, np.float64), 1
    # After a pass each position has the sum of twice as many rewards as before.
    while distance < returns.shape[1]:
        returns[:, :-distance] = returns[:, :-distance] + discount**distance * returns[:, distance:]
        distance *= 2
    return returns


def compute_token_advantages(
    advantage: Advantage, trajectories: Sequence[PositionRewards], credit: Credit, discount: float
) -> list[np.ndarray]:
    """Return the advantages of a group's G trajectories, [n_tokens] float32 each, one for each sampled token in the row's order.

    Raises:
        ScoreError: the turns of a trajectory are not known, or the advantage function returned the wrong shape.
    """
    for each in trajectories:
        if sum(each.turn_tokens) != each.n_tokens:
            raise ScoreError(
                f"of a trajectory's {each.n_tokens} sampled tokens {sum(each.turn_tokens)} belong to a turn: an older Rollmill "
                "stored it without its turns; set score.credit to trajectory"
            )
    of_each = [each.at(credit) for each in trajectories]
    n_positions = max(map(len, of_each), default=0)
    present = np.array([np.arange(n_positions) < len(each) for each in of_each])
    rewards = np.zeros(present.shape)
    rewards[present] = np.concatenate([np.empty(0), *of_each])
    if advantage.by_position is not None:
        found = advantage.by_position(rewards, present)
    else:
        found = _apply_by_position(advantage, returns_to_go(rewards, discount), present)
    with np.errstate(over="ignore"):
        return [
            each.spread(values[is_present], credit).astype(np.float32)
            for each, values, is_present in zip(trajectories, found, present, strict=True)
        ]


def _apply_by_position(advantage: Advantage, returns: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Apply an advantage function to [G, K] returns at each position, over the trajectories that have it."""
    found = np.zeros(returns.shape)
    # Trajectories only end, so that the positions between two ends are compared over the same ones.
    ends = [0, *sorted(set(present.sum(axis=1).tolist()) - {0})]
    for start, end in pairwise(ends):
        members = present[:, start]
        columns = returns[members, start:end]
        is_compared = np.full(end - start, True)
        if advantage.needs_spread:
            # Sums of the same rewards in another order are not equal.
            is_compared = differ(columns)
        chosen = columns[:, is_compared]
        values = np.zeros(columns.shape)
        if advantage.takes_columns and chosen.size:
            values[:, is_compared] = advantage.of_group(chosen)
        elif chosen.size:
            values[:, is_compared] = np.stack([advantage.of_group(each) for each in chosen.T], axis=1)
        found[members, start:end] = values
    return found
