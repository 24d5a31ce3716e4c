"""Settings of the data sets."""

from typing import Literal

from rollmill.tasks.config import StageConfig, setting


class StoreConfig(StageConfig):
    """Settings of the data sets."""

    root: str = setting("runs", "Folder that holds the runs: on a local disk, or s3://bucket/prefix.")
    lock_timeout_s: float = setting(
        10.0, "How long to wait for another process to release the run, in seconds.", ge=0.0
    )
    lease_s: float = setting(
        60.0,
        "Time without renewal after which another machine may take over a run on S3, in seconds; it is renewed three times as "
        "often.",
        ge=2.0,
        le=3600.0,
    )
    keep_routing_steps: int = setting(
        0,
        "Number of newest trained steps whose routed experts are kept; steps that a resumed run would train again are "
        "always kept; 0: all.",
        ge=0,
    )
    compact: Literal["never", "at_end", "after_grace"] = setting(
        "at_end",
        "Merge the small shards of a trained and checkpointed step into one for each partition. The value says when the small "
        "ones are deleted. at_end: at the end of the run, so that a reader never misses a file it has listed. after_grace: "
        "compaction_grace_s after the merge, which saves disk space. never: do not merge.",
    )
    compaction_grace_s: float = setting(
        10.0,
        "Shortest time that superseded shards are kept, in seconds: longer than any reader takes from listing them to opening "
        "the last one. The end of a run waits for it.",
        ge=0.1,
        le=3600.0,
    )
    min_free_bytes: int = setting(
        256 << 20,
        "Bytes that stay free on the disk of the run's folder (of its scratch folder for a run on S3); a step that is "
        "expected to need more does not start.",
        ge=0,
    )
