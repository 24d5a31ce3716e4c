"""The learning-rate schedule: linear warm-up, then constant, linear or cosine decay."""

import math

from rollmill.tasks.train.config import TrainConfig


def learning_rate(config: TrainConfig, n_updates: int) -> float:
    """Learning rate of the update that follows `n_updates` others.

    Example: with 3 warm-up updates the first has lr / 3, the third `lr`; with linear decay over 5 updates to a share of 0
    the fourth has `lr`, the fifth lr / 2, and all later ones 0.
    """
    warmup, end = config.warmup_steps, config.lr_decay_updates
    if n_updates < warmup:
        return config.lr * ((n_updates + 1) / warmup)
    if config.lr_decay == "none":
        return config.lr
    # After lr_decay_updates the rate stays at its least.
    done = min(1.0, (n_updates - warmup) / (end - warmup))
    left = 1.0 - done if config.lr_decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
