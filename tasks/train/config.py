"""Settings of the trainer and of the start model."""

from typing import Literal

from tasks.config import StageConfig, setting


class TrainConfig(StageConfig):
    url: str = setting(
        "", "Address (http://host:port) of a running trainer to attach to; empty: launch one here."
    )
    port: int = setting(
        0, "Loopback port of the launched trainer's control API; 0: any free one.", ge=0, le=65535
    )
    token_env: str = setting(
        "ROLLMILL_TRAINER_TOKEN", "Environment variable with an attached trainer's access token."
    )
    ranks: int = setting(1, "Trainer processes (W); with GPUs one for each.", ge=1, fixed=True)
    threads: int = setting(1, "CPU threads of each rank.", ge=1)
    zero_stage: Literal[0, 1, 2, 3] = setting(0, "DeepSpeed ZeRO stage.", fixed=True)
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Type of the trained weights.", fixed=True)
    micro_batch_tokens: int = setting(
        4096, "Most tokens, padding included, of one forward pass of a rank.", ge=1
    )
    lr: float = setting(1e-3, "Learning rate of AdamW.", ge=0.0)
    warmup_steps: int = setting(3, "Updates over which the learning rate rises from 0.", ge=0)
    weight_decay: float = setting(0.0, "AdamW's weight decay.", ge=0.0)
    beta1: float = setting(0.9, "AdamW's decay of the first moment.", ge=0.0, lt=1.0)
    beta2: float = setting(0.999, "AdamW's decay of the second moment.", ge=0.0, lt=1.0)
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0.0)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this global norm; 0: never.", ge=0.0)
    loss: Literal["clipped", "truncated"] = setting(
        "clipped",
        "Policy gradient with a clipped probability ratio, or with truncated importance weights, for rows that "
        "policies far from the trained one have sampled.",
    )
    importance_cap: float = setting(2.0, "With loss truncated: the largest weight of a token.", gt=0.0)
    clip_low: float = setting(0.2, "The probability ratio is clipped below at 1 - clip_low.", ge=0.0, lt=1.0)
    clip_high: float = setting(0.28, "The probability ratio is clipped above at 1 + clip_high.", ge=0.0)
    updates_per_step: int = setting(1, "Optimizer updates that one batch is split into.", ge=1, fixed=True)
    max_skipped_steps: int = setting(5, "Steps in a row without an update before the run stops.", ge=1)
    checkpoint_every: int = setting(
        10, "Steps between two checkpoints; the last step always makes one.", ge=1
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
