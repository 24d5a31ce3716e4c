"""The losses by name."""

from functools import partial

from tasks.train.config import TrainConfig
from tasks.train.losses.clipped import clipped_loss
from tasks.train.losses.token_loss import Loss
from tasks.train.losses.truncated import truncated_loss


def loss_of(config: TrainConfig) -> Loss:
    """The loss that `train.loss` names, with its settings."""
    match config.loss:
        case "clipped":
            return partial(clipped_loss, clip_low=config.clip_low, clip_high=config.clip_high)
        case "truncated":
            return partial(truncated_loss, cap=config.importance_cap)
