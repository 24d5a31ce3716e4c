"""The vLLM servers of a teacher: launched with its model, or running already."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.teacher_machine import teacher_server_settings
from rollmill.flows.configuration.config import AnnotateConfig
from rollmill.flows.policies.services import create_servers, start_services
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import ConfigError, ServiceDiedError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.model_folders import model_folder

# vLLM samples a token after every prompt, so a sequence as long as the model's limit needs one position more.
_LONGER = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


@asynccontextmanager
async def open_teacher_servers(config: AnnotateConfig, logs: Path) -> AsyncIterator[Sequence[VllmClient]]:
    """Launch vLLM servers with the teacher, or connect to those at serve.urls; launched ones end with the block.

    Raises:
        ServiceStartError: a server did not answer in time.
        ServiceDiedError: a launched server ended; with its last log lines.
        ConfigError: a running server has another model.
    """
    if config.serve.urls:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(VllmClient(url, config.serve)) for url in config.serve.urls
            ]
            for each in clients:
                await _check_served_model(config, each)
            yield clients
        return
    say(f"starting the vLLM servers with the teacher {config.teacher}")
    settings = teacher_server_settings(config)
    gpus = await asyncio.to_thread(assign_run_gpus, settings, samples=True, trains=False)
    services = create_servers(settings, model_folder(config.teacher), logs, gpus, _LONGER)
    async with start_services(services):
        try:
            yield [each.client for each in services]
        except Exception:
            for service in services:
                # Its log says more than the requests that it did not answer.
                if service.process is not None and not service.process.is_running:
                    reason = f"its process ended with status {service.process.returncode}"
                    raise ServiceDiedError(service.name, reason, service.process.log_tail()) from None
            raise


async def _check_served_model(config: AnnotateConfig, server: VllmClient) -> None:
    expected, found = Path(config.teacher).name, await server.model()
    if found != expected:
        remedy = f"it serves the model {found}, and the teacher is {expected}: correct the address, or give --teacher {found}"
        raise ConfigError("serve.urls", server.url, remedy)


async def check_served_tokenizer(tokenizer: ChatTokenizer, server: VllmClient, token_ids: np.ndarray) -> None:
    """Refuse a server that reads stored tokens ([T] ids) as another text than the run's tokenizer; ConfigError has both texts."""
    ids = token_ids.tolist()
    ours, theirs = "".join(tokenizer.pieces(ids)), await server.detokenize(ids)
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        remedy = (
            f"its tokenizer is not that of the run's model: it reads stored tokens as {theirs[at : at + 40]!r}, not as "
            f"{ours[at : at + 40]!r}; a teacher needs the same tokenizer"
        )
        raise ConfigError("serve.urls", server.url, remedy)
