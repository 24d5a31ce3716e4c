"""Settings of the data sets."""

from typing import Literal

from pydantic import field_validator

from rollmill.tasks.config import StageConfig, setting


class StoreConfig(StageConfig):
    """Settings of the data sets."""

    root: str = setting("runs", "Folder that holds the runs: on a local disk, or s3://bucket/prefix.")
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

    @field_validator("root")
    @classmethod
    def _drop_last_slash(cls, root: str) -> str:
        # On S3, where a key may have an empty part, bucket/runs/ would be another prefix than bucket/runs.
        return root if root.endswith("://") else root.rstrip("/") or root[:1]
