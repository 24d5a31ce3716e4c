"""Settings of what is measured and recorded."""

from tasks.config import StageConfig, setting


class ObserveConfig(StageConfig):
    max_unrecorded_task_runs: int = setting(
        2000, "Task runs that Prefect has not recorded yet before new rollouts are held back.", ge=1, le=9000
    )
    record_timeout_s: float = setting(
        60.0, "Seconds to wait at the run's end until Prefect has recorded it.", ge=0.0
    )
