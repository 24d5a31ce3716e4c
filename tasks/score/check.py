"""What must hold of the settings of scoring before anything is started."""

from tasks.errors import ConfigError
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
            held-out trajectories, which have no group.
    """
    parts_of(config)
    advantage_of(config.advantage)
    if parts_of(config, held_out_scorer).by_group:
        remedy = "held-out trajectories are scored one by one; name a scorer that does not compare those of a group"
        raise ConfigError("evaluate.scorer", held_out_scorer, remedy)
