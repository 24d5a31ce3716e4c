"""Settings of the executor: where a run's groups are sampled and scored."""

from typing import Literal

from rollmill.tasks.config import StageConfig, setting


class ExecutorConfig(StageConfig):
    """Settings of where groups are sampled and scored."""

    kind: Literal["local", "ray"] = setting(
        "local",
        "Where groups are sampled and scored: local (the flow's process), or ray (actors of a Ray cluster; needs rollmill[ray]).",
    )
    address: str = setting(
        "",
        "Address of a Ray cluster, as host:port, whose machines share the run's folder; empty: one is started on this machine.",
    )
    actors: int = setting(
        2, "Number of Ray actors that sample and score; each takes one CPU of the cluster.", ge=1
    )
