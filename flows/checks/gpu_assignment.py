"""The GPUs of a run's launched processes, from its settings and what is visible here."""

from collections.abc import Sequence

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.processes.gpus import GpuAssignment, assign_gpus, list_visible_gpus
from rollmill.tasks.serve.vllm_launch import gpus_per_server, is_cpu_build


def assign_run_gpus(
    config: RunConfig, *, samples: bool, trains: bool, visible: Sequence[str] | None = None
) -> GpuAssignment:
    """Assign the visible GPUs to a run's launched trainer and vLLM servers.

    Args:
        config: all settings.
        samples: False for a run without vLLM servers.
        trains: False for a run without a trainer.
        visible: GPUs to assign in place of those that are visible here, to servers of vLLM's CPU build too.

    Raises:
        ConfigError: the settings do not fit the visible GPUs.
    """
    serve, train = config.serve, config.train
    launches_servers = samples and not serve.urls
    uses_gpus = launches_servers and (visible is not None or not is_cpu_build(serve.python))
    assigned = assign_gpus(
        list_visible_gpus() if visible is None else visible,
        ranks=train.ranks if trains and not train.url else 0,
        servers=serve.servers if uses_gpus else 0,
        per_server=gpus_per_server(serve),
        train_gpus=train.gpus,
        serve_gpus=serve.gpus,
        shares=serve.share_gpus,
    )
    if uses_gpus or not launches_servers:
        return assigned
    return GpuAssignment(assigned.trainer, ("",) * serve.servers)
