"""RunConfig: the settings of all stages, those that only flows read, and the names that settings no longer have."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from rollmill.flows.configuration.environment_config import Environments, EvaluateConfig
from rollmill.flows.configuration.executor_config import ExecutorConfig
from rollmill.tasks.config import YEAR_S, StageConfig, setting
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import CheckpointConfig, StartModelConfig, TrainConfig

RENAMED = {
    "evaluate.enabled": "evaluate.every (0: no evaluation)",
    "evaluate.version": "the parameter `version` of the flow evaluate (`rollmill evaluate --version`)",
    "observe.experiment": "the environment variable MLFLOW_EXPERIMENT_NAME",
    "observe.task_run_tags": "observe.rollout_tags and observe.score_tags",
    "retrain.first_step": "retrain.where (step >= N)",
    "retrain.groups_per_step": "rollout.groups_per_step",
    "retrain.last_step": "retrain.where (step <= N)",
    "retrain.steps": "retrain.where (step between A and B)",
    "rollout.environment_args": "rollout.environment ({name: NAME, args: {ARGUMENT: VALUE}})",
    "rollout.group_timeout_s": "rollout.trajectory_timeout_s (a group may take twice as long)",
    "score.judge.prompt": "score.judge.prompt_file",
    "score.judge.score_max": "score.judge.score_range ([smallest, largest])",
    "score.judge.score_min": "score.judge.score_range ([smallest, largest])",
    "score.judge.timeout_s": "score.timeout_s (a request may take half of it)",
    "score.needs_whole_group": "score.min_group_size (0: all of a group)",
    "score.overlong_cache_tokens": "score.overlong_tokens ([limit - cache, limit])",
    "score.overlong_limit_tokens": "score.overlong_tokens ([limit - cache, limit])",
    "score.require_full_group": "score.min_group_size (0: all of a group)",
    "score.reward_model.timeout_s": "score.timeout_s (a request may take half of it)",
    "serve.api_key_env": "the environment variable ROLLMILL_VLLM_API_KEY",
    "serve.kv_cache_gib": "the environment variable VLLM_CPU_KVCACHE_SPACE (GiB)",
    "serve.max_num_seqs": "serve.extra_args ([--max-num-seqs, N])",
    "serve.max_restarts": "max_restarts",
    "serve.port": "the option --port of `rollmill vllm` (launched servers have free ports)",
    "serve.start_timeout_s": "start_timeout_s",
    "serve.threads": "the environment variable OMP_NUM_THREADS",
    "start_model.enabled": "start_model.steps (0: load `model`)",
    "store.remove_superseded": "store.compact (at_end, after_grace or never)",
    "train.behaviour": "train.old_logprobs (sampler, or trainer for recomputed)",
    "train.beta1": "train.betas ([first, second])",
    "train.beta2": "train.betas ([first, second])",
    "train.checkpoint_every": "checkpoint.every",
    "train.export_every": "checkpoint.export_every",
    "train.importance.cap": "train.importance.bounds ([smallest, largest])",
    "train.importance.floor": "train.importance.bounds ([smallest, largest])",
    "train.keep_checkpoint_every": "checkpoint.keep_every",
    "train.keep_checkpoints": "checkpoint.keep",
    "train.kl.place": "train.kl.apply_to",
    "train.loss_options": "train.loss ({name: NAME, args: {ARGUMENT: VALUE}})",
    "train.min_lr_share": "train.min_lr_ratio",
    "train.port": "the option --port of `rollmill trainer` (launched trainers have free ports)",
    "train.start_timeout_s": "start_timeout_s",
    "train.step_timeout_s": "train.command_timeout_s",
    "train.token_env": "the environment variable ROLLMILL_TRAINER_TOKEN",
}
"""What to write instead of each setting that has moved, by its old name."""

GONE = {
    "observe.step_run_timeout_s": "a step is a task run, which is made without waiting",
    "observe.step_runs": "a step is a task run, not a flow run",
    "rollout.collector_deployment": "one process collects a run",
    "rollout.collector_host": "one process collects a run",
    "rollout.collector_start_s": "one process collects a run",
    "rollout.collector_timeout_s": "one process collects a run",
    "rollout.collectors": "one process collects a run, or Ray actors do (executor.kind)",
    "rollout.prompts.max_prompts": "give a file with the prompts to use, or train[:1000] as rollout.prompts.train_split of a Hugging Face data set",
    "sync.parity_threshold": "differences are compared with those of earlier syncs, and weights byte by byte",
}
"""Why each setting without a successor was removed, by its name."""

CONSTANTS = {
    "evaluate.prompts_per_task": "64",
    "observe.exit_timeout_s": "3 s",
    "observe.hold_back_timeout_s": "60 s",
    "observe.leftovers_timeout_s": "30 s",
    "observe.max_lag_p99_ms": "250 ms",
    "observe.max_rss_growth": "0.25",
    "observe.max_stall_ms": "500 ms",
    "observe.max_unrecorded_task_runs": "2000",
    "observe.metrics_page_interval_s": "60 s",
    "observe.picture_every_s": "60 s",
    "observe.record_timeout_s": "60 s",
    "observe.sink_timeout_s": "20 s",
    "observe.step_page_every": "1",
    "rollout.env_max_restarts": "3",
    "rollout.env_start_timeout_s": "120 s",
    "rollout.max_attempts": "4",
    "rollout.retry_backoff_s": "0.5 s",
    "score.judge.connect_timeout_s": "5 s",
    "score.judge.max_attempts": "4",
    "score.judge.retry_backoff_s": "0.5 s",
    "score.reward_model.connect_timeout_s": "5 s",
    "score.reward_model.max_attempts": "4",
    "score.reward_model.retry_backoff_s": "0.5 s",
    "score.reward_model.use_activation": "false",
    "score.worker_start_timeout_s": "120 s",
    "serve.abort_grace_s": "2 s",
    "serve.attach_timeout_s": "60 s",
    "serve.connect_timeout_s": "10 s",
    "serve.control_attempts": "4",
    "serve.control_backoff_s": "0.2 s",
    "serve.decode_threads": "2",
    "serve.health_interval_s": "2 s",
    "serve.max_failures_in_a_row": "5",
    "serve.probe_timeout_s": "30 s",
    "serve.rejoin_timeout_s": "1800 s",
    "serve.stop_grace_s": "5 s",
    "start_model.batch_size": "64",
    "start_model.decay_share": "0.3",
    "start_model.heads": "start_model.hidden_size / 32",
    "start_model.intermediate_size": "2 x start_model.hidden_size",
    "start_model.layers": "2",
    "start_model.lr": "0.003",
    "start_model.max_position_embeddings": "4096",
    "start_model.root": "models",
    "start_model.threads": "1",
    "start_model.timeout_s": "1800 s",
    "start_model.warmup_steps": "100",
    "store.compaction_large_bytes": "8 MiB",
    "store.flush_s": "0.02 s on a disk, 2 s on S3",
    "store.lease_s": "60 s",
    "store.lock_timeout_s": "10 s",
    "store.min_free_bytes": "256 MiB",
    "sync.bucket_mib": "32 MiB",
    "sync.checksums": "8",
    "sync.ratio_threshold": "0.001",
    "sync.report_s": "10 s",
    "sync.straggler_s": "30 s",
    "sync.straggler_timeout_s": "30 s",
    "sync.streams": "2",
    "train.cuda_sync_spans": "true",
    "train.eps": "1e-8",
    "train.head_chunk_mib": "512 MiB",
    "train.heartbeat_timeout_s": "60 s",
    "train.lora.seed": "0",
    "train.micro_batch_overhead_tokens": "64",
    "train.recompute_rows": "32",
    "train.synchronize_parts": "true",
}
"""Value of each former setting that is a constant, by its name."""

FOREIGN = {
    "adv_estimator": "score.advantage",
    "batch_size": "rollout.groups_per_step (prompts, not trajectories)",
    "beta": "train.kl.coef",
    "clip_ratio_c": "train.clip_dual",
    "clip_ratio_high": "train.clip_high",
    "clip_ratio_low": "train.clip_low",
    "entropy_coeff": "train.entropy_coef",
    "epsilon": "train.clip_low",
    "epsilon_high": "train.clip_high",
    "grad_clip": "train.max_grad_norm",
    "kl_coef": "train.kl.coef",
    "kl_loss_coef": "train.kl.coef",
    "kl_loss_type": "train.kl.estimator",
    "kl_tau": "train.kl.coef",
    "learning_rate": "train.lr",
    "loss_agg_mode": "train.normalization",
    "loss_mode": "train.loss",
    "loss_type": "train.loss and train.normalization",
    "lr_warmup_steps": "train.warmup_steps",
    "mask_truncated_completions": "score.train_truncated (false)",
    "max_async_level": "rollout.max_staleness",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_off_policy_steps": "rollout.max_staleness",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_completion_tokens",
    "max_steps": "steps",
    "max_tokens": "rollout.max_completion_tokens",
    "num_generations": "rollout.group_size",
    "num_iterations": "train.epochs",
    "num_train_gpus": "train.ranks",
    "ppo_epochs": "train.epochs",
    "reward_funcs": "score.scorer and score.sum",
    "rollout_is_threshold": "train.importance.bounds",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "score.advantage",
    "seq_len": "serve.max_model_len and train.micro_batch_tokens",
    "staleness_threshold": "rollout.max_staleness",
    "total_training_steps": "steps",
    "truncation": "rollout.long_prompts",
    "train_batch_size": "rollout.groups_per_step",
    "vllm_max_model_length": "serve.max_model_len",
    "vllm_structured_outputs_regex": "rollout.sampling.structured_output",
}
"""Settings for what TRL, verl and prime-rl call otherwise, by the last part of its name there; docs/reference/glossary.md has all."""


DEEPEST_SECTION = 3


def find_moved_setting(values: object, prefix: str = "") -> tuple[str, object, str] | None:
    """Find the first renamed or removed setting in nested values; None if there is none.

    Returns its dotted name, its value and what to write instead.

    Example: {"train": {"min_lr_share": 0.1}} gives ("train.min_lr_share", 0.1, "use train.min_lr_ratio instead").
    """
    # Sections are nested three deep; YAML's aliases can nest a million values in ten lines.
    if not isinstance(values, Mapping) or prefix.count(".") > DEEPEST_SECTION:
        return None
    for name, value in values.items():
        field = f"{prefix}{name}"
        if field in RENAMED:
            return field, value, f"use {RENAMED[field]} instead"
        if field in CONSTANTS:
            return field, value, f"leave it out: it is a constant, {CONSTANTS[field]}"
        if field in GONE:
            return field, value, f"leave it out: {GONE[field]}"
        if found := find_moved_setting(value, f"{field}."):
            return found
    return None


def refuse_moved_settings(values: Any) -> None:
    """Raise PydanticCustomError for the first renamed or removed setting; its context has `field`, `value` and `remedy`."""
    if found := find_moved_setting(values):
        field, value, remedy = found
        context = {"field": field, "value": value, "remedy": remedy}
        raise PydanticCustomError("moved_setting", "{field}: {remedy}", context)


def drop_old_default(values: Any) -> Any:
    """Return settings without `retrain.steps` = [0, -1], the default that all runs have stored which are older than retrain.where."""
    retrain = values.get("retrain") if isinstance(values, Mapping) else None
    if isinstance(retrain, Mapping) and retrain.get("steps") == [0, -1]:
        return {**values, "retrain": {name: each for name, each in retrain.items() if name != "steps"}}
    return values


class FlowConfig(StageConfig):
    """Base of a flow's settings: refuses a setting that was renamed or removed, and names what to write instead."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_moved_settings(cls, values: Any) -> Any:
        values = drop_old_default(values)
        refuse_moved_settings(values)
        return values


class RetrainConfig(StageConfig):
    """Settings of training from stored rollouts."""

    sources: tuple[str, ...] = setting(
        (), "Runs whose rollouts are trained on: folders, or s3://bucket/prefix.", fixed=True, basic=True
    )
    scores: str = setting(
        "",
        "Scores to take rewards from, as NAME@VERSION; every source must have them. It has no default.",
        fixed=True,
        basic=True,
    )
    where: str = setting(
        "",
        "Condition in SQL on the stored groups to draw from, such as `step < 10 and reward between 0.2 and 0.8` "
        "(docs/how-to/rescoring.md has the columns); empty: all of the finished steps.",
        fixed=True,
    )
    order_by: str = setting(
        "",
        "Keys in SQL by which each pass orders the groups, such as `reward desc, step`; not together with `weight`. Empty: random order.",
        fixed=True,
    )
    weight: str = setting(
        "",
        "Number in SQL to which the probability that a step draws a group is proportional, such as `reward_std`; empty: a step takes the "
        "next groups of a pass over all.",
        fixed=True,
    )


class RescoreConfig(FlowConfig):
    """Settings of the flow rescore, which scores stored rollouts with another scorer."""

    score: ScoreConfig = setting(ScoreConfig(), "Scoring.")
    first_step: int = setting(0, "First step to score.", ge=0, basic=True)
    last_step: int = setting(-1, "Last step to score; -1: the last stored one.", ge=-1, basic=True)
    where: str = setting(
        "",
        "Condition in SQL on the stored groups to score, such as `env = 'addition'` (docs/how-to/rescoring.md has the columns); empty: all.",
        basic=True,
    )
    evaluations: bool = setting(False, "Also score stored held-out trajectories.", basic=True)
    redo_failed: bool = setting(False, "Score again what the scorer failed on.", basic=True)
    max_failed_share: float = setting(
        0.5, "Largest share of scores that may fail; above it rescoring stops.", ge=0.0, le=1.0
    )
    groups_per_task: int = setting(32, "Groups that one score task run scores.", ge=1)
    tasks_in_flight: int = setting(
        4, "Largest number of concurrent score task runs; their rows are in memory.", ge=1
    )
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")


class AnnotateConfig(FlowConfig):
    """Settings of the flow annotate, which stores a teacher's log-probabilities of stored rollouts."""

    teacher: str = setting(
        "",
        "Folder of the teacher's model (Hugging Face format), or its name on the Hugging Face hub; with serve.urls the name of the "
        "model that the servers have. It has no default.",
        basic=True,
    )
    name: str = setting(
        "",
        "Name under which the log-probabilities are stored, of letters, digits and . _ + -; empty: the last part of `teacher`.",
        basic=True,
    )
    first_step: int = setting(0, "First step.", ge=0, basic=True)
    last_step: int = setting(-1, "Last step; -1: the last stored one.", ge=-1, basic=True)
    where: str = setting(
        "",
        "Condition in SQL on the stored groups, such as `env = 'addition'` (docs/how-to/rescoring.md has the columns); empty: all.",
        basic=True,
    )
    max_in_flight: int = setting(256, "Largest number of concurrent requests to the teacher.", ge=1)
    start_timeout_s: float = setting(
        600.0,
        "Time limit for a launched vLLM server to become healthy, in seconds.",
        gt=0.0,
        le=YEAR_S,
    )
    serve: ServeConfig = setting(ServeConfig(), "The vLLM servers of the teacher.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")


class RunConfig(FlowConfig):
    """Settings of a run, whichever flow works on it."""

    model: str = setting(
        "",
        "Folder of the start model (Hugging Face format), or its name on the Hugging Face hub, from which it is downloaded once, "
        "to models/; empty only with start_model.steps above 0.",
        fixed=True,
        basic=True,
    )
    steps: int = setting(100, "Number of steps of the whole run.", ge=1, basic=True)
    seed: int = setting(
        0, "Seed of prompts, sampling and the start model.", ge=0, lt=2**31, fixed=True, basic=True
    )
    max_restarts: int = setting(
        2,
        "How often in a row, without a finished step in between, each launched trainer or vLLM server is restarted; the run "
        "stops when the trainer or the last server may not be restarted any more.",
        ge=0,
    )
    start_timeout_s: float = setting(
        600.0,
        "Time limit for a launched trainer or vLLM server to become healthy, in seconds.",
        gt=0.0,
        le=YEAR_S,
    )
    rollout: RolloutConfig = setting(RolloutConfig(), "Sampling.")
    score: ScoreConfig = setting(ScoreConfig(), "Scoring and advantages.")
    train: TrainConfig = setting(TrainConfig(), "The trainer.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "Checkpoints of the trainer.")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "Held-out evaluation, greedy and sampled.")
    serve: ServeConfig = setting(ServeConfig(), "The vLLM servers.")
    sync: SyncConfig = setting(SyncConfig(), "Weights from the trainer to the servers.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")
    start_model: StartModelConfig = setting(StartModelConfig(), "Recipe of a small start model, made here.")
    executor: ExecutorConfig = setting(ExecutorConfig(), "Where groups are sampled and scored.")
    retrain: RetrainConfig = setting(RetrainConfig(), "Stored rollouts to train from.")
    environments: Environments = setting(
        (),
        "Several environments in one run: each has a name, a weight, by which a step's groups are shared, and the settings of rollout, "
        "score and evaluate in which it differs from the run. They are given by name, as environments.NAME.weight=2, or as a list. "
        "Empty: the one of rollout.environment.",
        fixed=True,
    )

    @property
    def trajectories_per_step(self) -> int:
        """Number of trajectories of a step: its groups times the size of a group."""
        return self.rollout.groups_per_step * self.rollout.group_size
