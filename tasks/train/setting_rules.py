"""Checks of the trainer's settings against each other, before anything is started; imports no torch."""

from collections.abc import Mapping
from typing import TypeAlias

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig

_LEAST_STAGES = {
    "optimizer": (1, "the optimizer's state"),
    "optimizer_and_weights": (3, "the optimizer's state and the weights"),
}

HAS_RATIO: Mapping[str, bool] = {"reinforce": False, "ppo_clip": True, "cispo": True, "gspo": True}
"""The losses of this package; True for those whose gradient is weighted by pi / mu."""


_PAPER_SETTINGS = {
    "cispo": "train.clip_low=1 and train.clip_high=4",
    "gspo": "train.clip_low=3e-4, train.clip_high=4e-4 and train.normalization=sequence",
}
"""What a loss is used with whose ratio the default bounds, those of ppo_clip, do not fit: docs/reference/algorithms.md has the papers."""


def check_objective(config: TrainConfig, *, has_ratio: bool | None = None) -> None:
    """Refuse settings of the objective that contradict each other.

    Args:
        config: the settings.
        has_ratio: for a loss of another package, whether the probability ratio weights its gradient; None if not known.

    Raises:
        ConfigError: names the first wrong setting.
    """
    loss = config.loss
    if loss.name in HAS_RATIO and loss.args:
        remedy = f"{loss.name} takes none; it has its settings in train (clip_low, clip_high)"
        raise ConfigError("train.loss.args", loss.args, remedy)
    ratio_rules = _importance_rules(config, HAS_RATIO.get(loss.name, has_ratio))
    for field, value, is_wrong, remedy in [
        *_clip_rules(config),
        *ratio_rules,
        *_rate_rules(config),
        *_reference_rules(config),
    ]:
        if is_wrong:
            raise ConfigError(field, value, remedy)


def check_offload(config: TrainConfig, device_type: str = "cuda") -> None:
    """Refuse an offload that the ZeRO stage or the device does not support.

    Args:
        config: the settings.
        device_type: "cpu" or "cuda", where a rank computes; the default where that is not known yet.

    Raises:
        ConfigError: names train.offload and what to change.
    """
    if config.offload == "none":
        return
    least, what = _LEAST_STAGES[config.offload]
    if config.zero_stage < least:
        remedy = (
            f"to offload {what}, train.zero_stage must be at least {least}; it is {config.zero_stage}: "
            "raise it, or set train.offload=none"
        )
        raise ConfigError("train.offload", config.offload, remedy)
    if device_type == "cpu":
        remedy = "this trainer computes on the CPU, whose memory everything is in already; set it to none"
        raise ConfigError("train.offload", config.offload, remedy)


_Rule: TypeAlias = tuple[str, object, bool, str]
"""(field, value, is wrong, remedy)."""


_DEFAULT_CLIPS = (TrainConfig().clip_low, TrainConfig().clip_high)


def _clip_rules(config: TrainConfig) -> list[_Rule]:
    dual, clips, loss = config.clip_dual, (config.clip_low, config.clip_high), config.loss.name
    advice = f"set {_PAPER_SETTINGS.get(loss)}, as in its paper, or join the preset {loss}"
    return [
        (
            "train.loss",
            loss,
            loss in _PAPER_SETTINGS and clips == _DEFAULT_CLIPS,
            f"train.clip_low and train.clip_high are the defaults {clips[0]:g} and {clips[1]:g}, which are bounds of ppo_clip; "
            f"{advice}, or give other bounds",
        ),
        (
            "train.normalization",
            config.normalization,
            loss == "gspo" and config.normalization != "sequence",
            f"the loss gspo has one ratio for an answer, and normalization {config.normalization} weights an answer by its length; {advice}",
        ),
        (
            "train.clip_dual",
            dual,
            0.0 < dual <= 1.0,
            "must be above 1, such as 3, or every token with a negative advantage is clipped; 0: no dual clip",
        ),
        (
            "train.clip_dual",
            dual,
            dual > 0.0 and loss != "ppo_clip",
            f"is for the loss ppo_clip, and train.loss is {loss}: set it to 0; train.importance.mode=masked leaves out "
            "tokens with large ratios",
        ),
    ]


def _importance_rules(config: TrainConfig, has_ratio: bool | None) -> list[_Rule]:
    mode, bounds = config.importance.mode, config.importance.bounds
    return [
        (
            "train.importance.mode",
            mode,
            mode == "truncated" and bool(has_ratio) and config.old_logprobs == "sampler",
            f"the loss {config.loss.name} has the ratio to the sampler already, and would count it twice; set "
            "train.old_logprobs=trainer, or mode masked, or a loss without a ratio (reinforce)",
        ),
        (
            "train.importance.bounds",
            bounds,
            bounds[0] >= bounds[1],
            "give the smallest ratio first, then a larger one",
        ),
        (
            "train.importance.bounds",
            bounds,
            not bounds[0] <= 1.0 <= bounds[1],
            "tokens of the policy that is trained have the ratio 1, which the bounds must contain",
        ),
        (
            "train.importance.bounds",
            bounds,
            mode != "masked" and bounds[0] > 0.0,
            "a smallest ratio above 0 is for train.importance.mode masked, which leaves smaller ratios out; the mode is "
            f"{mode}",
        ),
    ]


def _rate_rules(config: TrainConfig) -> list[_Rule]:
    """Return the rules for the settings of the loss's denominator and of the learning rate."""
    return [
        (
            "train.normalization_tokens",
            config.normalization_tokens,
            config.normalization == "fixed_length" and config.normalization_tokens == 0,
            "normalization fixed_length needs the length that every row counts for, such as the longest completion "
            "(rollout.max_completion_tokens)",
        ),
        (
            "train.lr_decay_updates",
            config.lr_decay_updates,
            config.lr_decay != "none" and config.lr_decay_updates <= config.warmup_steps,
            f"lr_decay {config.lr_decay} needs a number of updates above train.warmup_steps, which is "
            f"{config.warmup_steps}",
        ),
        (
            "train.lr_decay_updates",
            config.lr_decay_updates,
            config.lr_decay == "none" and config.lr_decay_updates > 0,
            "the rate falls with train.lr_decay linear or cosine alone: set it, or give 0",
        ),
        (
            "train.min_lr_ratio",
            config.min_lr_ratio,
            config.lr_decay == "none" and config.min_lr_ratio > 0.0,
            "the rate falls with train.lr_decay linear or cosine alone: set it, or give 0",
        ),
    ]


def _reference_rules(config: TrainConfig) -> list[_Rule]:
    return [
        (
            "train.kl.model",
            config.kl.model,
            bool(config.kl.model) and config.kl.reference != "frozen",
            f"is the model of a frozen reference, and train.kl.reference is {config.kl.reference}: set it to frozen, or "
            "give no model",
        ),
        (
            "train.kl.urls",
            list(config.kl.urls),
            bool(config.kl.urls) and config.kl.reference != "deployment",
            f"are servers of a reference deployment, and train.kl.reference is {config.kl.reference}: set it to "
            "deployment, or give none",
        ),
        (
            "train.kl.teacher",
            config.kl.teacher,
            bool(config.kl.teacher) != (config.kl.reference == "stored"),
            f"is the name of a teacher whose log-probabilities are stored, for train.kl.reference: stored alone, and that is "
            f"{config.kl.reference}",
        ),
    ]
