"""What must hold of the settings of scoring before anything is started."""

from tasks.score.advantages import advantage_of
from tasks.score.config import ScoreConfig
from tasks.score.registry import parts_of


def check_scorer(config: ScoreConfig, scorer: str = "") -> None:
    """Make the scorer and find the advantage function of a configuration, and start nothing.

    Args:
        config: the settings.
        scorer: another scorer than theirs, for evaluation.

    Raises:
        ConfigError: one of them cannot be imported, or lacks a setting that it needs.
    """
    parts_of(config, scorer)
    advantage_of(config.advantage)
