"""What must hold of a run that trains from stored rollouts, before anything is started."""

from flows.config import RunConfig
from tasks.errors import ConfigError
from tasks.score.advantages import advantage_of
from tasks.score.check import check_scorer
from tasks.score.registry import parts_of


def check_offline(config: RunConfig) -> None:
    """Refuse settings with which the flow retrain could not end well.

    Raises:
        ConfigError: there are no sources or no scores, or held-out trajectories would be scored by another scorer
            than the one whose scores are trained on, without that being asked for.
    """
    if not config.retrain.sources:
        raise ConfigError("retrain.sources", (), "name the runs whose rollouts are to be trained on")
    advantage_of(config.score.advantage)
    if not config.evaluate.enabled:
        return
    check_scorer(config.score, config.evaluate.scorer)
    scorer = parts_of(config.score)
    key = f"{scorer.name}@{scorer.version}"
    if not config.evaluate.scorer and key != config.retrain.scores:
        remedy = (
            f"held-out trajectories would be scored by {key}: set score.scorer to the scorer of these scores, name "
            "another in evaluate.scorer, or set evaluate.enabled=false"
        )
        raise ConfigError("retrain.scores", config.retrain.scores, remedy)
