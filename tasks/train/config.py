"""Settings of the trainer and of the start model."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator

from rollmill.tasks.config import ADDRESS, YEAR_S, Address, Gpu, HeadDtype, StageConfig, choose_dtype, setting
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.user_code.plug_in import PlugIn

Ratio = Annotated[float, Field(ge=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

# Longest sequence of a start model, in tokens: the default of serve.max_model_len. No weight depends on it.
START_MODEL_POSITIONS = 4096
# Width of an attention head of a start model: vLLM's kernels for CPUs take multiples of 32.
START_MODEL_HEAD_SIZE = 32


class KLConfig(StageConfig):
    """Settings of the KL divergence."""

    coef: float = setting(0.0, "Coefficient of the KL divergence (beta); 0: none.", ge=0.0, basic=True)
    reference: Literal["none", "frozen", "deployment", "stored"] = setting(
        "none",
        "Source of the reference policy's log-probabilities. frozen: a frozen copy in the trainer. deployment: vLLM servers "
        "at `urls`. stored: those of `teacher`, stored with the rollouts that rollmill retrain trains on.",
        fixed=True,
        basic=True,
    )
    estimator: Literal["k1", "k2", "k3"] = setting("k3", "Estimator of the divergence from one token.")
    apply_to: Literal["loss", "advantage"] = setting(
        "loss",
        "loss: add the divergence to the loss, with its gradient. advantage: subtract it from the token's advantage, "
        "without gradient.",
    )
    model: str = setting(
        "",
        "Folder of the reference model, or its name on the Hugging Face hub, from which it is downloaded as `model` is; empty: the "
        "start model.",
        fixed=True,
    )
    urls: tuple[Address, ...] = setting(
        (),
        "Addresses (http://host:port) of the vLLM servers with the reference policy, for reference: deployment.",
        fixed=True,
    )
    teacher: str = setting(
        "",
        "Name of the teacher for reference: stored, as `rollmill annotate` stored its log-probabilities.",
        fixed=True,
    )


class ImportanceConfig(StageConfig):
    """Importance sampling: correction for tokens that the sampler drew from another policy than the trained one."""

    mode: Literal["none", "truncated", "masked"] = setting(
        "none",
        "truncated: multiply the loss by the importance ratio, at most the larger bound. masked: multiply, and leave out each "
        "ratio outside the bounds.",
    )
    level: Literal["token", "sequence", "sequence_mean"] = setting(
        "token",
        "Compute the ratio of each token, or one for all trained tokens of a trajectory. sequence: their product. sequence_mean: "
        "their geometric mean, which does not depend on the length.",
    )
    bounds: tuple[Ratio, Ratio] = setting(
        (0.0, 2.0), "Smallest and largest importance ratio; the smallest is for mode masked."
    )


class LoraConfig(StageConfig):
    """Settings of low-rank adapters (library peft)."""

    rank: int = setting(
        0, "Rank of the adapters; 0: no adapters, all weights are trained.", ge=0, le=65536, fixed=True
    )
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0.0, fixed=True)
    targets: tuple[str, ...] = setting(
        (),
        "Layers with adapters, by name or end of name, such as q_proj; empty: every linear layer but the head.",
        fixed=True,
    )
    send: Literal["adapters", "merged"] = setting(
        "adapters",
        "What a sync sends. adapters: the adapters alone; servers need the start model at the same path. merged: all weights "
        "with the adapters merged in.",
    )


class TrainConfig(StageConfig):
    """Settings of the trainer."""

    loss: PlugIn = setting(
        PlugIn(name="ppo_clip"),
        "Loss of a token: ppo_clip (PPO, GRPO, Dr. GRPO, DAPO), reinforce, cispo, gspo, or an import path "
        "package.module:function (docs/reference/algorithms.md).",
        basic=True,
    )
    lr: float = setting(1e-6, "Learning rate of AdamW.", ge=0.0, le=1.0, basic=True)
    kl: KLConfig = setting(KLConfig(), "KL divergence of the policy from a reference policy.")
    ranks: int = setting(1, "Trainer processes; one GPU for each.", ge=1, le=4096, basic=True)
    gpus: tuple[Gpu, ...] = setting(
        (),
        "GPUs of a launched trainer's ranks, by their position among the visible ones or by UUID, such as [0,1]; empty: the first "
        "ones.",
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        choose_dtype,
        "Number format of the trained weights. Default: bfloat16 if the machine where the settings are read has a GPU, else "
        "float32.",
        fixed=True,
    )
    zero_stage: int = setting(
        0,
        "DeepSpeed ZeRO stage. 0 becomes 1 in bfloat16, whose weights are kept in single precision by the optimizer of stage 1.",
        ge=0,
        le=3,
        basic=True,
        validate_default=True,
    )
    head_dtype: HeadDtype = setting(
        "float32",
        "Number format of the logits, in the trainer and in launched servers. float32: those of a bfloat16 model are not rounded to "
        "bfloat16, so that both agree more closely. model: that of the weights.",
        fixed=True,
    )
    micro_batch_tokens: int = setting(
        8192,
        "Largest number of tokens, padding included, of one forward pass of a rank. A prompt that rows share counts once, and attention "
        "stores it for each row: lower this for large groups with long prompts. All segments of a trajectory are in one pass: where an "
        "environment changes the context, an episode is truncated before they could have more tokens.",
        ge=1,
    )
    gradient_checkpointing: bool = setting(
        True,
        "Compute activations again in the backward pass instead of storing them: less memory, a third more time.",
    )
    offload: Literal["none", "optimizer", "optimizer_and_weights"] = setting(
        "none",
        "What DeepSpeed keeps in the machine's memory instead of the GPU's: the optimizer needs ZeRO stage 1 or more, weights "
        "stage 3.",
    )
    lora: LoraConfig = setting(LoraConfig(), "Low-rank adapters.")
    warmup_steps: int = setting(3, "Updates over which the learning rate rises from 0.", ge=0)
    lr_decay: Literal["none", "linear", "cosine"] = setting(
        "none", "How the learning rate falls after the warm-up, over lr_decay_updates updates."
    )
    lr_decay_updates: int = setting(
        0, "Updates, warm-up included, after which the learning rate is at its minimum; 0: never.", ge=0
    )
    min_lr_ratio: float = setting(0.0, "Minimum of the learning rate, as a ratio of `lr`.", ge=0.0, le=1.0)
    weight_decay: float = setting(0.0, "Weight decay of AdamW.", ge=0.0)
    weight_decay_on: Literal["all", "matrices"] = setting(
        "all",
        "Parameters with weight decay. all: every trained one. matrices: all but norms, biases and other vectors.",
    )
    betas: tuple[Decay, Decay] = setting((0.9, 0.999), "Decay of AdamW's first and second moment.")
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this global norm; 0: no limit.", ge=0.0)
    router_aux_loss_coef: float = setting(
        0.0, "Coefficient of the load-balancing loss of a mixture of experts; 0: none.", ge=0.0, le=10.0
    )
    clip_low: float = setting(0.2, "The probability ratio is clipped below at 1 - clip_low.", ge=0.0, le=1.0)
    clip_high: float = setting(0.28, "The probability ratio is clipped above at 1 + clip_high.", ge=0.0)
    clip_dual: float = setting(
        0.0,
        "Dual clip of ppo_clip: the loss of a token with a negative advantage is at most clip_dual times the advantage's absolute "
        "value; above 1, such as 3; 0: not bounded.",
        ge=0.0,
    )
    normalization: Literal["token", "sequence", "fixed_length"] = setting(
        "token",
        "What the loss is divided by. token: the trained tokens of the global batch. sequence: the tokens of each trajectory, "
        "then the number of trajectories. fixed_length: normalization_tokens times the number of trajectories.",
    )
    normalization_tokens: int = setting(
        0,
        "Length in tokens that every trajectory counts for with normalization fixed_length.",
        ge=0,
    )
    entropy_coef: float = setting(0.0, "Coefficient of the entropy bonus.", ge=0.0)
    importance: ImportanceConfig = setting(
        ImportanceConfig(),
        "Correction for tokens that the sampler drew from another policy than the trained one.",
    )
    old_logprobs: Literal["sampler", "trainer"] = setting(
        "sampler",
        "Old log-probabilities in the probability ratio. sampler: those of vLLM, which cost nothing. trainer: computed by the "
        "trainer before the step, concurrently with scoring; of imported trajectories by the policy that training starts from.",
    )
    epochs: int = setting(1, "Passes over a batch, each in updates_per_step updates.", ge=1, fixed=True)
    updates_per_step: int = setting(1, "Optimizer updates that one batch is split into.", ge=1, fixed=True)
    max_skipped_steps: int = setting(
        5, "Largest number of consecutive steps without an update; one more stops the run.", ge=1
    )
    annotate_every: int = setting(
        0, "Steps between two steps that store token annotations in the data set annotations; 0: none.", ge=0
    )
    replay_routing: bool = setting(
        False,
        "Route every token to the experts stored with its rollout (rollout.keep_routing); mixture-of-experts models only.",
        fixed=True,
    )
    layout: Literal["auto", "padded", "varlen"] = setting(
        "auto",
        "How trajectories share a forward pass. padded: trajectories of similar length, padded. varlen: one after another "
        "without padding, a common prompt computed once. auto: varlen where model and machine support it.",
    )
    threads: int = setting(1, "CPU threads of each rank.", ge=1, le=4096)
    url: str = setting(
        "",
        "Address (http://host:port) of a running trainer to attach to; empty: launch one on this machine.",
        pattern=ADDRESS,
    )
    command_timeout_s: float = setting(
        3600.0,
        "Time limit of one command of the trainer (a step, a load, a checkpoint), in seconds.",
        gt=0.0,
        le=YEAR_S,
    )

    @field_validator("zero_stage")
    @classmethod
    def _raise_stage(cls, value: int, info: ValidationInfo) -> int:
        return max(1, value) if info.data.get("dtype") == "bfloat16" else value


# Settings of `train` that no update depends on, except for rounding, or that a loaded trainer cannot change.
NOT_BY_STEP = {
    *(
        "ranks",
        "gpus",
        "zero_stage",
        "offload",
        "dtype",
        "head_dtype",
        "lora",
        "replay_routing",
        "threads",
        "url",
    ),
    *("micro_batch_tokens", "gradient_checkpointing", "layout", "command_timeout_s", "max_skipped_steps"),
    *("kl.reference", "kl.model", "kl.urls", "kl.teacher"),
}


def settings_by_step(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that an update depends on and that may change between two steps, by name, as {"train.lr": 1e-6}."""
    return {
        f"train.{name}": value
        for name, value in _flatten(config, config.model_dump(mode="json"))
        if name not in NOT_BY_STEP
    }


def _flatten(config: StageConfig, values: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        inner = getattr(config, name)
        if isinstance(inner, StageConfig) and name not in NOT_BY_STEP:
            yield from _flatten(inner, value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def with_settings(config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with other values of settings that may change between two steps, by name, as {"train.lr": 1e-6}.

    Raises:
        ConfigError: names a setting that cannot change between two steps, or its invalid value.
    """
    values, known = config.model_dump(mode="json"), settings_by_step(config)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(name, value, "no setting of this name can change between two steps")
        *sections, last = name.removeprefix("train.").split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = value
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["train", *(str(part) for part in first["loc"])])
        raise ConfigError(field, first["input"], first["msg"]) from None


class CheckpointConfig(StageConfig):
    """Settings of checkpoints."""

    every: int = setting(10, "Steps between two checkpoints; the last step always has one.", ge=1, basic=True)
    keep: int = setting(2, "Number of newest checkpoints to keep; 0: all.", ge=0)
    keep_every: int = setting(
        0, "Checkpoints of versions that are multiples of this are never deleted; 0: none.", ge=0
    )
    export_every: int = setting(
        0,
        "Steps between two versions that are exported as Hugging Face folders to RUN/policies/; 0: none.",
        ge=0,
    )


class StartModelConfig(StageConfig):
    """Settings of a small start model made here by supervised training on the environment's warm-up corpus."""

    steps: int = setting(
        0,
        "Steps of supervised training that make a small start model in place of `model` (900 take about a minute); 0: load "
        "`model`.",
        ge=0,
        fixed=True,
    )
    hidden_size: int = setting(
        128,
        f"Width of the hidden states, a multiple of {START_MODEL_HEAD_SIZE}.",
        multiple_of=START_MODEL_HEAD_SIZE,
        gt=0,
        fixed=True,
    )


class StartModelRecipe(StageConfig):
    """Sizes and training settings of the small start model, with defaults that suit the quickstart.

    Attributes:
        steps: optimizer steps.
        layers: decoder layers.
        hidden_size: width of the hidden states; the feed-forward layers have twice that.
        max_position_embeddings: longest sequence in tokens.
        batch_size: examples of one step.
        lr: largest learning rate of AdamW.
        warmup_steps: steps over which the learning rate rises from 0.
        decay_share: last share of the steps over which the rate falls linearly to 0.
    """

    steps: int
    layers: int = 2
    hidden_size: int
    max_position_embeddings: int = START_MODEL_POSITIONS
    batch_size: int = 64
    lr: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.3
