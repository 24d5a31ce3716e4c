"""What must hold of the settings of scoring before anything is started."""

import numpy as np

from tasks.errors import ConfigError, ScoreError
from tasks.score.advantages.registry import advantage_of
from tasks.score.config import ScoreConfig
from tasks.score.registry import parts_of


def check_scorer(config: ScoreConfig, held_out_scorer: str = "") -> None:
    """Make the scorers and find the advantage function of a configuration, and start nothing.

    Args:
        config: the settings.
        held_out_scorer: that of evaluations; empty: the same as of the steps.

    Raises:
        ConfigError: one of them cannot be imported, lacks a setting that it needs, or cannot score
            held-out trajectories, which have no group; or the advantage function does not give a number a reward.
    """
    parts_of(config)
    _try_advantage(config)
    if parts_of(config, held_out_scorer).by_group:
        remedy = "held-out trajectories are scored one by one; name a scorer that does not compare those of a group"
        raise ConfigError("evaluate.scorer", held_out_scorer, remedy)


def _try_advantage(config: ScoreConfig) -> None:
    """Take the advantages of the smallest group that has any, and the batch's part over them."""
    advantage = advantage_of(config.advantage)
    rewards = np.arange(max(2, config.min_group_size), dtype=np.float64)
    try:
        found = advantage.of_group(rewards)
        if advantage.of_batch is not None:
            advantage.of_batch(found, np.ones(len(rewards), np.int64))
    except ScoreError as error:
        remedy = f"tried on the rewards {rewards.tolist()}: {error}"
        raise ConfigError("score.advantage", config.advantage, remedy) from error
