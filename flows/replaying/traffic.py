"""Synthetic traffic: requests that stand for those of live generation, on the event loop of what is measured."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tasks.serve.client import VllmClient
from tasks.serve.config import ServeConfig
from tasks.serve.process import LaunchedProcess, free_port

PROMPT_TOKENS = 64
BETWEEN_S = 0.1
"""Seconds, at most, from an answer to the next request: the environment's turn, which is a timer here."""


@asynccontextmanager
async def synthetic_traffic(
    config: ServeConfig, n_tasks: int, n_tokens: int, logs: Path
) -> AsyncIterator[Sequence[int]]:
    """Keep so many tasks busy on the running loop: each asks a server, decodes its answer, and waits for a timer.

    The server is a process of its own, which answers as a vLLM server does, with made-up tokens, after 0.5 to 1.5 s;
    the requests go through the client that rollouts go through.

    Args:
        config: settings of the clients.
        n_tasks: how many; 0: none, and no server.
        n_tokens: of each answer.
        logs: folder of the server's log.

    Yields:
        The process ids of what stands for servers.

    Raises:
        ServiceStartError: the server did not start.
        RequestError: it failed meanwhile.
    """
    if not n_tasks:
        yield []
        return
    port = free_port()
    server = LaunchedProcess.start(
        "the server of synthetic traffic",
        [sys.executable, "-m", "flows.replaying.traffic_server", str(port), str(n_tokens)],
        log=logs / "traffic.log",
        stop_grace_s=config.stop_grace_s,
    )
    client = VllmClient(f"http://127.0.0.1:{port}", config, api_key="")
    try:
        await client.wait_until_healthy(config.start_timeout_s, server)
        async with asyncio.TaskGroup() as traffic:
            tasks = [traffic.create_task(_ask(client, config, seed)) for seed in range(n_tasks)]
            yield [server.pid]
            for task in tasks:
                task.cancel()
    finally:
        await client.close()
        await server.stop()


async def _ask(client: VllmClient, config: ServeConfig, seed: int) -> None:
    """One request after another, for ever."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 1000, PROMPT_TOKENS, np.int32)
    while True:
        await asyncio.sleep(BETWEEN_S * random.random())
        await client.generate(
            prompt, max_tokens=1, temperature=1.0, seed=seed, timeout_s=config.request_timeout_s
        )
