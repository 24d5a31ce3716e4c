"""Settings of the trainer and of the start model."""

from typing import Literal

from tasks.config import StageConfig, setting, variable


class KLConfig(StageConfig):
    """Divergence of the policy from a reference policy."""

    coef: float = setting(0.0, "Weight of the divergence; 0: none.", ge=0.0)
    estimator: Literal["k1", "k2", "k3"] = setting("k3", "Estimator of the divergence from one token.")
    place: Literal["loss", "advantage"] = setting(
        "loss", "Add it to the loss, with its gradient, or take it from the token's advantage, without."
    )
    reference: Literal["none", "frozen", "deployment"] = setting(
        "none",
        "Where the reference's log-probabilities come from: a frozen copy in the trainer, or vLLM servers.",
        fixed=True,
    )
    model: str = setting("", "Folder of the frozen model; empty: the start model.", fixed=True)
    urls: tuple[str, ...] = setting(
        (), "Addresses (http://host:port) of the vLLM servers with the reference policy, for `deployment`."
    )


class ImportanceConfig(StageConfig):
    """Importance sampling for tokens whose sampler was not the trained policy."""

    mode: Literal["none", "truncated", "masked"] = setting(
        "none", "Multiply by the ratio up to `cap`, or leave out what lies outside of `floor` and `cap`."
    )
    level: Literal["token", "sequence"] = setting(
        "token", "Take the ratio of a token, or of all trained tokens of its row."
    )
    cap: float = setting(2.0, "Largest ratio.", gt=0.0)
    floor: float = setting(0.0, "Least ratio, with mode masked.", ge=0.0)


class LoraConfig(StageConfig):
    """Low-rank adapters (the library peft)."""

    rank: int = setting(0, "Rank of the adapters; 0: all weights are trained.", ge=0, fixed=True)
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0.0, fixed=True)
    targets: tuple[str, ...] = setting(
        (),
        "Names of the layers that get adapters, or how they end: q_proj; empty: every linear layer but the head.",
        fixed=True,
    )
    seed: int = setting(0, "Seed of the adapters' random start.", ge=0, fixed=True)
    send: Literal["adapters", "merged"] = setting(
        "adapters",
        "What travels to the servers: the adapters, which need the start model's folder at the same path on the "
        "servers' machines, or whole weights with the adapters merged in.",
    )


class TrainConfig(StageConfig):
    url: str = setting(
        "", "Address (http://host:port) of a running trainer to attach to; empty: launch one here."
    )
    port: int = setting(
        0, "Loopback port of the launched trainer's control API; 0: any free one.", ge=0, le=65535
    )
    token_env: str = variable(
        "ROLLMILL_TRAINER_TOKEN", "Environment variable with an attached trainer's access token."
    )
    ranks: int = setting(1, "Trainer processes (W); with GPUs one for each.", ge=1)
    threads: int = setting(1, "CPU threads of each rank.", ge=1)
    zero_stage: int = setting(0, "DeepSpeed ZeRO stage.", ge=0, le=3)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of the trained weights.", fixed=True)
    micro_batch_tokens: int = setting(
        4096, "Most tokens, padding included, of one forward pass of a rank.", ge=1
    )
    micro_batch_overhead_tokens: int = setting(
        64,
        "What one more forward and backward pass costs beside its tokens, in tokens: padding is weighed against it.",
        ge=0,
    )
    lr: float = setting(1e-3, "Learning rate of AdamW.", ge=0.0)
    warmup_steps: int = setting(3, "Updates over which the learning rate rises from 0.", ge=0)
    weight_decay: float = setting(0.0, "AdamW's weight decay.", ge=0.0)
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", ge=0.0, lt=1.0)
    beta2: float = setting(0.999, "AdamW's decay of the second moment.", ge=0.0, lt=1.0)
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0.0)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this global norm; 0: never.", ge=0.0)
    lr_decay: Literal["none", "linear", "cosine"] = setting(
        "none", "How the learning rate falls after the warm-up, over lr_decay_updates."
    )
    lr_decay_updates: int = setting(
        0, "Updates, those of the warm-up included, after which the rate is at its least; 0: never.", ge=0
    )
    min_lr_share: float = setting(0.0, "Share of `lr` that the rate falls to.", ge=0.0, le=1.0)
    loss: str = setting(
        "ppo_clip",
        "Loss of a token: ppo_clip (PPO, GRPO, Dr. GRPO, DAPO), reinforce, cispo, gspo, or an import path "
        "package.module:function (docs/algorithms.md).",
    )
    loss_options: tuple[str, ...] = setting(
        (), "Settings of a loss of your own, NAME=VALUE each, passed to it by name."
    )
    clip_low: float = setting(0.2, "The probability ratio is clipped below at 1 - clip_low.", ge=0.0, le=1.0)
    clip_high: float = setting(0.28, "The probability ratio is clipped above at 1 + clip_high.", ge=0.0)
    normalization: Literal["token", "sequence", "fixed_length"] = setting(
        "token",
        "Denominator of the loss: the trained tokens of the global batch; each row's own tokens, then the rows; or "
        "normalization_tokens times the rows.",
    )
    normalization_tokens: int = setting(
        0, "With normalization fixed_length: the length that every row counts for.", ge=0
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus.", ge=0.0)
    kl: KLConfig = setting(KLConfig(), "Divergence from a reference policy.")
    importance: ImportanceConfig = setting(
        ImportanceConfig(), "Correction for tokens that another policy than the trained one has sampled."
    )
    behaviour: Literal["sampler", "recomputed"] = setting(
        "sampler",
        "Whose log-probabilities the probability ratio is against: the sampler's, which cost nothing, or the "
        "trainer's own before the step, computed beside scoring.",
    )
    recompute_rows: int = setting(
        32,
        "With behaviour recomputed: most trajectories whose log-probabilities are computed at a time beside scoring; a "
        "step that is to be trained waits for one such bundle at most.",
        ge=1,
    )
    epochs: int = setting(1, "Passes over a batch, each in updates_per_step updates.", ge=1, fixed=True)
    updates_per_step: int = setting(1, "Optimizer updates that one batch is split into.", ge=1, fixed=True)
    max_skipped_steps: int = setting(
        5, "Steps in a row that may make no update; one more stops the run.", ge=1
    )
    checkpoint_every: int = setting(
        10, "Steps between two checkpoints; the last step always makes one.", ge=1
    )
    keep_checkpoints: int = setting(2, "Newest checkpoints to keep; 0: all.", ge=0)
    keep_checkpoint_every: int = setting(
        0, "Checkpoints of versions that are multiples of this are kept for good; 0: none is.", ge=0
    )
    export_every: int = setting(
        0, "Steps between two versions stored as Hugging Face folders below policies/; 0: none is.", ge=0
    )
    annotate_every: int = setting(
        0, "Steps between two whose tokens are annotated in the data set annotations; 0: none is.", ge=0
    )
    layout: Literal["auto", "padded", "varlen"] = setting(
        "auto",
        "How rows go through the model together: rows of like length padded, or one after another without padding and "
        "with a common prompt computed once; auto: varlen where the model and the machine can.",
    )
    head_chunk_mib: int = setting(
        512, "Most MiB of logits at a time; more trained tokens go through the head in chunks.", ge=1
    )
    gradient_checkpointing: bool = setting(
        False, "Compute activations again in the backward pass instead of keeping them."
    )
    offload: Literal["none", "optimizer", "optimizer_and_weights"] = setting(
        "none",
        "What DeepSpeed keeps in the machine's memory instead of the GPU's: under ZeRO stage 1 at least, weights under 3.",
    )
    lora: LoraConfig = setting(LoraConfig(), "Train low-rank adapters instead of all weights.")
    replay_routing: bool = setting(
        False,
        "Route every token to the experts stored with its rollout (rollout.keep_routing); of mixture-of-experts models.",
        fixed=True,
    )
    synchronize_parts: bool = setting(
        True,
        "On a GPU each part of a step (forward, backward, optimizer) ends when the device is done with it, so that its "
        "seconds are its own; false: the host runs ahead, and what it waits for later is booked there.",
    )
    start_timeout_s: float = setting(600.0, "Seconds the trainer has to become healthy.", gt=0.0)
    step_timeout_s: float = setting(
        3600.0, "Seconds one command (a step, a load, a checkpoint) may take.", gt=0.0
    )
    heartbeat_timeout_s: float = setting(
        60.0, "Seconds of silence after which a rank counts as dead.", gt=0.0
    )


class StartModelConfig(StageConfig):
    """Recipe of a small start model made here by supervised training on the environment's warm-up corpus."""

    enabled: bool = setting(
        False, "Make the start model by this recipe instead of loading `model`.", fixed=True
    )
    root: str = setting("models", "Folder that keeps start models, each under a digest of recipe and seed.")
    layers: int = setting(2, "Decoder layers.", ge=1, fixed=True)
    hidden_size: int = setting(128, "Width of the hidden states.", ge=8, fixed=True)
    heads: int = setting(4, "Attention heads.", ge=1, fixed=True)
    intermediate_size: int = setting(256, "Width of the feed-forward layers.", ge=8, fixed=True)
    max_position_embeddings: int = setting(256, "Longest sequence in tokens.", ge=8, fixed=True)
    steps: int = setting(900, "Optimizer steps of supervised training.", ge=1, fixed=True)
    batch_size: int = setting(64, "Examples of one step.", ge=1, fixed=True)
    lr: float = setting(3e-3, "Learning rate of AdamW.", gt=0.0, fixed=True)
    warmup_steps: int = setting(100, "Steps over which the learning rate rises from 0.", ge=0, fixed=True)
    decay_share: float = setting(
        0.3, "Last share of the steps over which the rate falls linearly to 0.", ge=0.0, le=1.0, fixed=True
    )
    threads: int = setting(1, "CPU threads; more spin on each other where cores are shared.", ge=1)
    timeout_s: float = setting(1800.0, "Seconds the training may take.", gt=0.0)
