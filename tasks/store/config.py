"""Settings of the data sets."""

from tasks.config import StageConfig, setting


class StoreConfig(StageConfig):
    root: str = setting("runs", "Folder that holds the runs' folders, one a run.")
    flush_s: float = setting(
        0.02,
        "Seconds a commit waits for more rows, so that shards are few; 0 commits at once.",
        ge=0.0,
        le=60.0,
    )
    lock_timeout_s: float = setting(10.0, "Seconds to wait for another process to let go of the run.", ge=0.0)
