"""A run whose servers and trainer are killed and stopped during syncs: it continues, and no server serves wrong weights."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import polars as pl
import pytest
from aiohttp import web

from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.processes.supervisor import descendants
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from tests.stubs.toy_settings import TOY

pytestmark = [pytest.mark.service, pytest.mark.long]

STEPS, GROUPS, GROUP_SIZE = 7, 4, 4
KILLED_AT, STOPPED_AT, TRAINER_KILLED_AT = 1, 3, 5
"""Policy versions at whose sync it goes wrong."""
REPOSITORY = Path(__file__).parents[2]
LET_IN_BY_S = 300.0
STALL_S = 6.0
LARGE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "initializer_range": 0.05,
}
"""41 MB: half of it is more than the system takes of a connection whose other end does not read."""


class Proxy:
    """A proxy of one server that reports each order of weights before it passes it on.

    While `is_open` is not set, generation requests are held, which is how the test waits for something else.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream, self.url = upstream, f"http://127.0.0.1:{free_port()}"
        self.on_order: Callable[[int, str], Awaitable[None]] | None = None
        self.orders: list[tuple[int, str]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            yield self.url
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.method == "POST" and request.path == "/rollmill/weights":
            order = json.loads(body)
            received = int(order["version"].rpartition(":")[2]), order["transport"]
            self.orders.append(received)
            if self.on_order:
                await self.on_order(*received)
        elif request.path == "/inference/v1/generate" and b'"prompt_logprobs"' not in body:
            await self.is_open.wait()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=body, headers=headers
            ) as answer:
                return web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()


class Server:
    """A vLLM server that can be killed, stopped, and started again at the same address."""

    def __init__(self, model: Path, log: Path, python: str) -> None:
        self._model, self._log = model, log
        self.config, self._port = ServeConfig(**TOY["serve"], python=python), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = vllm_launch.vllm_command(self.config, str(self._model), self._port)
        environment = vllm_launch.vllm_environment(self.config)
        self.process = LaunchedProcess.start(
            "vLLM server", command, log=self._log, env=environment, stop_grace_s=2.0
        )

    async def version(self) -> str:
        async with VllmClient(self.url, self.config) as client:
            return await client.version() if await client.is_healthy() else ""

    def signal(self, number: int) -> None:
        for pid in descendants(self.process.pid):
            os.kill(pid, number)


def trainer_rank(workplace: Any, rank: int) -> int:
    """Process id of a rank of the run's trainer."""
    for pid, command in workplace.processes().items():
        if "rollmill.tasks.train.service.trainer_process" in command and f"\0RANK={rank}\0" in _environment(
            pid
        ):
            return pid
    raise AssertionError(f"no rank {rank} among {workplace.processes()}")


def _environment(pid: int) -> str:
    return "\0" + Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


async def until(condition: Callable[[], Any], process: Any) -> None:
    """Wait for something that a running command does."""
    async with asyncio.timeout(LET_IN_BY_S):
        while not (result := condition()) or (asyncio.iscoroutine(result) and not await result):
            assert process.poll() is None, f"the command ended: {process.communicate()[0]}"
            await asyncio.sleep(0.1)


def rows(run: Path, dataset: str) -> pl.DataFrame:
    files = list(run.glob(f"{dataset}/**/*.arrow"))
    return pl.scan_ipc(files).collect() if files else pl.DataFrame()


async def test_a_run_continues_with_right_weights_whichever_process_dies_or_stalls_during_a_sync(
    workplace: Any, save_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = save_tiny(Qwen2ForCausalLM, Qwen2Config, **LARGE)
    run = workplace.folder / "runs" / "small"
    python = str(workplace.vllm_python)
    workplace.environment["PYTHONPATH"] = f"{REPOSITORY}:{Path(__file__).parent}"
    async with AsyncExitStack() as stack:
        servers = [Server(model, tmp_path / f"vllm-{number}.log", python) for number in range(2)]
        for server in servers:
            stack.push_async_callback(lambda server=server: server.process.stop())
        proxies = [Proxy(server.url) for server in servers]
        urls = [await stack.enter_async_context(proxy.serving()) for proxy in proxies]
        chaotic, (calm_proxy, chaotic_proxy) = servers[1], proxies
        done = {name: asyncio.Event() for name in ("killed", "back", "stopped", "trainer killed")}

        async def on_order(version: int, transport: str) -> None:
            """What goes wrong, each once, when an order of a version reaches the second server."""
            if version >= KILLED_AT and not done["killed"].is_set():
                rank = trainer_rank(workplace, 1)
                os.kill(rank, signal.SIGSTOP)  # so that a part of the weights cannot come
                asyncio.get_running_loop().call_later(1.0, die, rank)
            elif version >= STOPPED_AT and done["back"].is_set() and not done["stopped"].is_set():
                chaotic.signal(signal.SIGSTOP)
                done["stopped"].set()
            elif version >= TRAINER_KILLED_AT and not done["trainer killed"].is_set():
                os.kill(trainer_rank(workplace, 1), signal.SIGKILL)
                done["trainer killed"].set()

        def die(rank: int) -> None:
            chaotic.signal(signal.SIGKILL)
            os.kill(rank, signal.SIGCONT)
            done["killed"].set()

        chaotic_proxy.on_order = on_order
        for server in servers:
            async with VllmClient(server.url, server.config) as client:
                await client.wait_until_healthy(LET_IN_BY_S, server.process)
        settings = {
            "steps": STEPS,
            "model": model,
            "start_model.steps": "0",
            "serve.urls": f"[{', '.join(urls)}]",
            "rollout.groups_per_step": GROUPS,
            "rollout.group_size": GROUP_SIZE,
            "rollout.max_completion_tokens": 8,
            "train.ranks": 2,
            "train.zero_stage": 3,
            "train.lr": 1e-5,
            "checkpoint.every": 3,
            "score.scorer": "digit_scorer:DigitScorer",
            "sync.transport": "tcp",
            "sync.stall_timeout_s": STALL_S,
            "evaluate.every": "0",
        }
        process = workplace.start(
            "run", "small", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
        )
        try:
            await until(done["killed"].is_set, process)
            await chaotic.process.stop()
            calm_proxy.is_open.clear()
            n_orders = len(chaotic_proxy.orders)
            chaotic.start()
            await until(lambda: has_weights(chaotic), process)
            assert [transport for _, transport in chaotic_proxy.orders[n_orders:]] == ["files"]
            done["back"].set()
            calm_proxy.is_open.set()

            await until(done["stopped"].is_set, process)
            n_orders = len(calm_proxy.orders)
            await until(lambda: len(calm_proxy.orders) > n_orders, process)
            chaotic.signal(signal.SIGCONT)
            calm_proxy.is_open.clear()
            n_orders = len(chaotic_proxy.orders)
            await until(lambda: len(chaotic_proxy.orders) > n_orders, process)
            assert chaotic_proxy.orders[n_orders][1] == "files"
            calm_proxy.is_open.set()

            await until(done["trainer killed"].is_set, process)
            output, _ = await asyncio.to_thread(process.communicate, timeout=LET_IN_BY_S)
        finally:
            for server in servers:
                server.signal(signal.SIGCONT)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                output, _ = await asyncio.to_thread(process.communicate, timeout=60)
                (tmp_path / "output.txt").write_text(output)
        assert process.returncode == 0, output
    check(run, urls, output)


async def has_weights(server: Server) -> bool:
    return await server.version() not in ("", "default")


def check(run: Path, urls: list[str], output: str) -> None:
    """Every trajectory once, by both servers, by weights that gave the probabilities that the trainer finds."""
    stored = rows(run, "rollouts")
    assert len(stored) == stored["trajectory_id"].n_unique() == STEPS * GROUPS * GROUP_SIZE
    assert set(stored["server"]) == set(urls), output
    metrics = rows(run, "metrics")
    compared = metrics.filter(pl.col("name") == "sync/logprob_difference")["value"].drop_nans()
    assert compared.len() >= STEPS - 1
    assert compared.max() <= 1e-4
    assert metrics.filter(pl.col("name") == "train/first_ratio_deviation")["value"].max() <= 1e-3
    assert output.count("is back, at version") >= 2, output
