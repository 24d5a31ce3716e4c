"""Settings of the data sets."""

from typing import Literal

from tasks.config import StageConfig, setting


class StoreConfig(StageConfig):
    root: str = setting(
        "runs", "Folder that holds the runs' folders, one a run: on a local disk, or s3://bucket/prefix."
    )
    flush_s: float = setting(
        0.02,
        "Seconds a commit waits for more rows, so that shards are few; 0 commits at once.",
        ge=0.0,
        le=60.0,
    )
    keep_routing_steps: int = setting(
        0,
        "Trained steps whose routed experts are kept, the last ones; those that a resumed run would train again stay; "
        "0: all.",
        ge=0,
    )
    lock_timeout_s: float = setting(10.0, "Seconds to wait for another process to let go of the run.", ge=0.0)
    compact: bool = setting(
        True, "Put the small shards of steps that are trained and checkpointed into one for each partition."
    )
    compaction_grace_s: float = setting(
        10.0,
        "Seconds that shards stay at least after a compacted one took their place: longer than any reader takes from "
        "listing them to opening the last. The end of a run waits for it.",
        ge=0.1,
        le=3600.0,
    )
    remove_superseded: Literal["at_end", "after_grace"] = setting(
        "at_end",
        "When shards go whose rows a compacted one holds: at the run's end, so that no file that a plain scan lists is "
        "gone when it opens it, or in the run already, after the grace, which saves their space meanwhile.",
    )
    compaction_large_bytes: int = setting(
        8 << 20,
        "Mean size of a partition's shards from which on they are left as they are, bytes.",
        ge=1,
    )
    lease_s: float = setting(
        60.0,
        "Seconds after a writer's last sign of life until another machine may take over a run on S3; signs come three "
        "times as often.",
        ge=2.0,
        le=3600.0,
    )
    min_free_bytes: int = setting(
        256 << 20,
        "Bytes of the disk under the run's folder (of a run on S3: under its scratch folder) that stay free: a step that "
        "is expected to leave less is not begun.",
        ge=0,
    )
