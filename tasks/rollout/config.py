"""Settings of sampling."""

from tasks.config import StageConfig, setting


class RolloutConfig(StageConfig):
    environment: str = setting(
        "addition", "Environment: a registered name, or an import path package.module:Class.", fixed=True
    )
    groups_per_step: int = setting(32, "Prompts of one step (P).", ge=1, fixed=True)
    group_size: int = setting(8, "Trajectories sampled for one prompt (G).", ge=1, fixed=True)
    max_in_flight: int = setting(256, "Most trajectories that are sampled at the same time.", ge=1)
    temperature: float = setting(1.0, "Sampling temperature.", gt=0.0, le=10.0, fixed=True)
    max_completion_tokens: int = setting(24, "Most tokens of one completion.", ge=1, fixed=True)
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
        0, "Worker processes that play the environment; 0: the flow's process (never for verifiers).", ge=0
    )
    env_timeout_s: float = setting(
        60.0,
        "Seconds an environment in a worker process has for one answer; a worker that answers no ping for as long is "
        "ended and started again.",
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
        300.0,
        "Seconds one trajectory may take, a wait for a restarted server included; then it is cut.",
        gt=0.0,
    )
    group_timeout_s: float = setting(
        900.0, "Seconds from a group's first start until what is not done of it is cut.", gt=0.0
    )
    max_attempts: int = setting(
        4, "Sends of one request, the first included, when the error is transient.", ge=1
    )
    retry_backoff_s: float = setting(
        0.5, "Seconds before the second send; doubled each time, with jitter.", gt=0.0
    )
    max_failed_share: float = setting(
        0.5,
        "Share of a step's trajectories that may fail, in sampling or in scoring, before the run stops.",
        ge=0.0,
        le=1.0,
    )
