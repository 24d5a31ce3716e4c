"""Settings of sampling."""

from typing import Literal

from tasks.config import StageConfig, setting


class PromptsConfig(StageConfig):
    """Where the problems of the environment `prompts` are."""

    path: str = setting(
        "",
        "A .jsonl or .parquet file, a folder of .parquet files, a folder saved by the library `datasets`, or, with "
        "format huggingface, a data set's name.",
        fixed=True,
    )
    held_out_path: str = setting(
        "", "File or folder of the held-out problems; empty: they are split off `path`.", fixed=True
    )
    format: Literal["", "jsonl", "parquet", "huggingface"] = setting(
        "", "Format of both; empty: by the path.", fixed=True
    )
    subset: str = setting("", "Configuration of a named Hugging Face data set.", fixed=True)
    prompt_column: str = setting(
        "prompt", "Column with the problem: a text, or a list of messages {role, content}.", fixed=True
    )
    answer_column: str = setting("answer", "Column with the reference answer; empty: none.", fixed=True)
    answer_pattern: str = setting(
        "", "Regular expression whose first group is the answer in that column; empty: all of it.", fixed=True
    )
    columns: tuple[str, ...] = setting((), "More columns that scorers may read.", fixed=True)
    system: str = setting("", "System prompt before every problem; empty: none.", fixed=True)
    split_column: str = setting(
        "", "Column that names a row's split; empty: held out is a share by the problem's crc32.", fixed=True
    )
    train_split: str = setting("train", "Training split, in that column or data set.", fixed=True)
    held_out_split: str = setting(
        "",
        "Held-out split there; empty: what the column says of all other rows, or a share of a data set.",
        fixed=True,
    )
    held_out_share: float = setting(
        0.1, "Share of the problems that is held out when nothing else says so.", gt=0.0, lt=1.0, fixed=True
    )
    max_prompts: int = setting(0, "Most problems of a split, the first ones; 0: all.", ge=0, fixed=True)


class RolloutConfig(StageConfig):
    environment: str = setting(
        "addition",
        "Environment: a registered name, an import path package.module:Class, or verifiers:NAME of the verifiers "
        "library.",
        fixed=True,
    )
    environment_args: str = setting(
        "",
        'Arguments of an environment of a library: a JSON object, such as {"taskset": {"split": "train"}}.',
        fixed=True,
    )
    prompts: PromptsConfig = setting(PromptsConfig(), "Problems of the environment `prompts`.")
    groups_per_step: int = setting(32, "Prompts of one step (P).", ge=1, fixed=True)
    max_refill_groups: int = setting(
        0,
        "Most further groups that a step samples in place of those that cannot be trained on (dynamic sampling); 0: none.",
        ge=0,
        fixed=True,
    )
    group_size: int = setting(8, "Trajectories sampled for one prompt (G).", ge=1, fixed=True)
    max_in_flight: int = setting(256, "Most trajectories that are sampled at the same time.", ge=1)
    temperature: float = setting(1.0, "Sampling temperature.", gt=0.0, le=10.0, fixed=True)
    max_completion_tokens: int = setting(24, "Most tokens of one completion.", ge=1, fixed=True)
    keep_routing: bool = setting(
        False,
        "Keep which experts every token was routed to, of a mixture of experts served on GPUs (bulk: see "
        "store.keep_routing_steps).",
        fixed=True,
    )
    keep_states: tuple[str, ...] = setting(
        (),
        "State of a library's environment to keep, NAME:TYPE each (int64, float64, bool, string, list<int64>, ...); "
        "without a type: string, its JSON.",
        fixed=True,
    )
    trajectories_per_task: int = setting(
        0, "Trajectories of a group that one rollout task and its score task take; 0: the whole group.", ge=0
    )
    max_staleness: int = setting(
        0,
        "Steps that a rollout's first policy version may lie behind the step it trains; 0: strictly on-policy.",
        ge=0,
        fixed=True,
    )
    env_workers: int = setting(
        0,
        "Worker processes that play the environment; 0: the flow's process, or one worker for verifiers:NAME.",
        ge=0,
    )
    env_timeout_s: float = setting(
        60.0,
        "Seconds an environment in a worker process has for one answer; a worker that answers no ping for as long is "
        "ended and started again. So long has every environment for an opening that servers are checked on.",
        gt=0.0,
    )
    env_start_timeout_s: float = setting(
        120.0, "Seconds a worker process has to import and make the environment.", gt=0.0
    )
    env_worker_max_episodes: int = setting(
        0, "Episodes after which another worker process takes over, against leaks; 0: never.", ge=0
    )
    env_max_restarts: int = setting(
        3,
        "How often in a row a worker process may fail without having ended one episode, before the run stops.",
        ge=0,
    )
    trajectory_timeout_s: float = setting(
        900.0,
        "Seconds one trajectory may take, a wait for a restarted server included; then it is cut.",
        gt=0.0,
    )
    group_timeout_s: float = setting(
        1800.0, "Seconds from a group's first start until what is not done of it is cut.", gt=0.0
    )
    max_attempts: int = setting(
        4, "Sends of one request, the first included, when the error is transient.", ge=1
    )
    retry_backoff_s: float = setting(
        0.5, "Seconds before the second send; doubled each time, with jitter.", gt=0.0
    )
    collectors: int = setting(
        0,
        "Flow runs of their own among which the groups are shared (docs/collectors.md); 0: the run's own process collects.",
        ge=0,
    )
    collector_deployment: str = setting(
        "collect/collector", "Deployment of the flow collect, FLOW/NAME, that collectors are flow runs of."
    )
    collector_host: str = setting(
        "127.0.0.1",
        "Address of this machine at which collectors reach the run; they are on this machine unless it is another.",
    )
    collector_start_s: float = setting(
        120.0,
        "Seconds that the first groups wait for a collector; then the run's own process collects until one joins.",
        ge=0.0,
    )
    collector_timeout_s: float = setting(
        30.0,
        "Seconds without a sign of life after which a collector, or to a collector the run, counts as gone.",
        gt=0.0,
    )
    max_failed_share: float = setting(
        0.5,
        "Share of a step's trajectories that may fail, in sampling or in scoring, before the run stops.",
        ge=0.0,
        le=1.0,
    )
