"""The part of an advantage that is taken over the whole batch, once all its groups are judged."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.errors import ScoreError
from tasks.score.advantages.registry import advantage_of
from tasks.score.config import ScoreConfig
from tasks.score.outcome import GroupOutcome


def settled(config: ScoreConfig, outcomes: Sequence[GroupOutcome]) -> list[GroupOutcome]:
    """The outcomes of a step, by group, with the advantages that are trained on.

    They are those of the groups, unless the advantage has a part over the batch. That sees the trajectories that are in
    the batch, in its order, so that it gives the same to the bit whenever a step is settled again.

    Raises:
        ScoreError: that part did not give one finite float32 for each trajectory.
    """
    ordered = sorted(outcomes, key=lambda outcome: (outcome.group, outcome.subgroup))
    of_batch = advantage_of(config.advantage).of_batch
    if of_batch is None or not any(outcome.in_batch.any() for outcome in ordered):
        return ordered
    advantages = np.concatenate([outcome.advantages[outcome.in_batch] for outcome in ordered])
    n_tokens = np.array(
        [survivor.n_tokens for outcome in ordered for survivor, _ in outcome.trained], np.int64
    )
    with np.errstate(over="ignore", invalid="ignore"):
        given = np.asarray(of_batch(advantages.astype(np.float64), n_tokens)).astype(np.float32)
    if not np.isfinite(given).all():
        raise ScoreError(
            f"score.advantage {config.advantage}: over the batch it gave a number that is not finite"
        )
    parts = np.split(given, np.cumsum([outcome.in_batch.sum() for outcome in ordered])[:-1])
    return [_with(outcome, part) for outcome, part in zip(ordered, parts, strict=True)]


def _with(outcome: GroupOutcome, given: np.ndarray) -> GroupOutcome:
    advantages = outcome.advantages.copy()
    advantages[outcome.in_batch] = given
    return replace(outcome, advantages=advantages)
