"""Synthetic traffic: requests like those of live generation, on the event loop that is measured."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.processes.python_child import child_environment, python_command
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient

# Seconds in which the server of made-up answers starts: it imports no torch.
START_TIMEOUT_S = 60.0
PROMPT_TOKENS = 64
# Longest pause, in seconds, between an answer and the next request; it takes the place of an environment.
BETWEEN_S = 0.1


@asynccontextmanager
async def synthetic_traffic(
    config: ServeConfig, n_tasks: int, n_tokens: int, logs: Path
) -> AsyncIterator[Sequence[int]]:
    """Keep `n_tasks` tasks busy on the running loop: each sends a request, decodes the answer, and waits for a timer.

    The requests use the client of rollouts. Their server is a separate process, which answers like a vLLM server, with
    made-up tokens, after 0.5 to 1.5 s.

    Args:
        config: settings of the clients.
        n_tasks: concurrent requests; 0: none, and no server.
        n_tokens: tokens of each answer.
        logs: folder of the server's log.

    Yields:
        The process ids of the server.

    Raises:
        ServiceStartError: the server did not start.
        RequestError: it failed later.
    """
    if not n_tasks:
        yield []
        return
    port = free_port()
    server = LaunchedProcess.start(
        "the server of synthetic traffic",
        python_command("rollmill.flows.offline.traffic_server", str(port), str(n_tokens)),
        log=logs / "traffic.log",
        env=child_environment(),
    )
    client = VllmClient(f"http://127.0.0.1:{port}", config, api_key="")
    try:
        await client.wait_until_healthy(START_TIMEOUT_S, server)
        async with asyncio.TaskGroup() as traffic:
            tasks = [traffic.create_task(_ask(client, config, seed)) for seed in range(n_tasks)]
            yield [server.pid]
            for task in tasks:
                task.cancel()
    finally:
        await client.close()
        await server.stop()


async def _ask(client: VllmClient, config: ServeConfig, seed: int) -> None:
    """Send one request after another, with random pauses seeded by `seed`, until cancelled."""
    # Each task has its own sequence, so that a measurement can be repeated.
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 1000, PROMPT_TOKENS, np.int32)
    while True:
        await asyncio.sleep(BETWEEN_S * random.random())
        await client.generate(
            prompt, max_tokens=1, temperature=1.0, seed=seed, timeout_s=config.request_timeout_s
        )
