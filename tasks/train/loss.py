"""The losses by name."""

from collections.abc import Callable, Mapping
from functools import partial

from tasks.config import named
from tasks.train.config import TrainConfig
from tasks.train.losses.cispo import cispo
from tasks.train.losses.ppo_clip import ppo_clip
from tasks.train.losses.token_loss import Loss

LOSSES: Mapping[str, Callable[[TrainConfig], Loss]] = {
    "ppo_clip": lambda train: partial(ppo_clip, clip_low=train.clip_low, clip_high=train.clip_high),
    "cispo": lambda train: partial(cispo, clip_low=train.clip_low, clip_high=train.clip_high),
}


def loss_of(config: TrainConfig) -> Loss:
    """The loss that `train.loss` names, with its settings.

    Raises:
        ConfigError: there is no such loss.
    """
    if config.loss in LOSSES:
        return LOSSES[config.loss](config)
    loss: Loss = named("train.loss", config.loss, dict.fromkeys(LOSSES, ""))
    return loss
