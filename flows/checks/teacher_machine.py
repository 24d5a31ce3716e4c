"""What the vLLM servers of a teacher need: their settings, as those of a run, and the checks of this machine."""

import asyncio

from rollmill.flows.checks.attached import check_teacher_servers
from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.gpu_memory import check_gpus
from rollmill.flows.checks.machine_needs import check_vllm
from rollmill.flows.configuration.config import AnnotateConfig, RunConfig
from rollmill.tasks.processes.gpus import read_gpus
from rollmill.tasks.store.model_folders import model_folder


def teacher_server_settings(config: AnnotateConfig) -> RunConfig:
    """Return the settings of a run whose servers are those of the teacher."""
    serve = config.serve.model_copy(update={"max_model_len": config.serve.max_model_len + 1})
    return RunConfig(
        model=str(model_folder(config.teacher)), serve=serve, start_timeout_s=config.start_timeout_s
    )


def check_teacher_machine(config: AnnotateConfig) -> None:
    """Refuse a machine that cannot run the teacher's servers, or addresses at which there are none; ConfigError names the setting."""
    if config.serve.urls:
        asyncio.run(check_teacher_servers(config))
        return
    settings = teacher_server_settings(config)
    check_vllm(settings)
    check_gpus(settings, assign_run_gpus(settings, samples=True, trains=False), read_gpus())
