"""A run while everything around it fails: one request in five, one of two servers, scorers that raise and hang."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

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

GROUPS, GROUP_SIZE = 8, 4
FAILING_SHARE = 0.2
REPOSITORY = Path(__file__).parents[2]


class Course(NamedTuple):
    """Of how many steps a run is, in which one server is killed and started again, and from which on it is awaited."""

    steps: int
    killed_in: int
    started_in: int
    awaited_in: int


SMALL, WHOLE = Course(9, 2, 4, 6), Course(20, 5, 10, 14)


class FailingProxy:
    """Stands before one server; of its generation requests a share fails, each in one of three ways.

    A request is refused (503), its connection breaks before it is passed on, or after, when the answer is lost.
    While `is_open` is not set, generation requests are held, which is how the test waits for something else.
    """

    def __init__(self, upstream: str, seed: int) -> None:
        self.upstream = upstream
        self.url = f"http://127.0.0.1:{free_port()}"
        self.n_failed = 0
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._random = random.Random(seed)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(self.url.rpartition(":")[2])).start()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            yield self.url
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        act = ""
        if request.path == "/inference/v1/generate":
            act = self._act()
            if b'"prompt_logprobs"' not in body:
                await self.is_open.wait()
        if act == "refuse":
            return web.Response(status=503)
        if act == "break":
            return _broken(request)
        try:
            async with self._session.request(
                request.method, self.upstream + request.path_qs, data=body, headers=_json()
            ) as answer:
                passed = web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientError:
            return _broken(request)
        return _broken(request) if act == "lose" else passed

    def _act(self) -> str:
        if self._random.random() >= FAILING_SHARE:
            return ""
        self.n_failed += 1
        return self._random.choice(("refuse", "break", "lose"))


def _broken(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _json() -> dict[str, str]:
    return {"Content-Type": "application/json"}


class Server:
    """A vLLM server that can be killed and started again at the same address."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self._config, self._port = ServeConfig(**TOY["serve"], python=str(vllm_python())), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = vllm_launch.vllm_command(self._config, str(self._model), self._port)
        environment = vllm_launch.vllm_environment(self._config)
        self.process = LaunchedProcess.start(
            "vLLM server", command, log=self._log, env=environment, stop_grace_s=2.0
        )

    async def wait_until_healthy(self) -> None:
        async with VllmClient(self.url, self._config) as client:
            await client.wait_until_healthy(900.0, self.process)

    async def has_weights_of_a_run(self) -> bool:
        async with VllmClient(self.url, self._config) as client:
            return await client.is_healthy() and await client.version() != "default"

    async def kill(self) -> None:
        for pid in descendants(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        await self.process.stop()


def vllm_python() -> Path:
    return Path(sys.executable).parents[2] / ".venv-vllm" / "bin" / "python"


def rows(run: Path, dataset: str) -> pl.DataFrame:
    if not list(run.glob(f"{dataset}/**/*.arrow")):
        return pl.DataFrame({"step": [], "status": []})
    return pl.scan_ipc(run / f"{dataset}/**/*.arrow", hive_partitioning=True).collect()


async def until(condition: Callable[[], Any], process: Any) -> None:
    """Wait for something that a running command does."""
    async with asyncio.timeout(900.0):
        while not (result := condition()) or (asyncio.iscoroutine(result) and not await result):
            assert process.poll() is None, f"the command ended: {process.communicate()[0]}"
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("course", [SMALL, WHOLE], ids=["small", "whole"])
async def test_a_run_completes_while_requests_a_server_and_scorers_fail(
    workplace: Any, tied_model: Path, tmp_path: Path, course: Course
) -> None:
    run = workplace.folder / "runs" / "small"
    workplace.environment["PYTHONPATH"] = f"{REPOSITORY}:{Path(__file__).parent}"
    async with AsyncExitStack() as stack:
        servers = [Server(tied_model, tmp_path / f"vllm-{number}.log") for number in range(2)]
        for server in servers:
            stack.push_async_callback(lambda server=server: server.process.stop())
        proxies = [FailingProxy(server.url, seed) for seed, server in enumerate(servers)]
        urls = [await stack.enter_async_context(proxy.serving()) for proxy in proxies]
        await asyncio.gather(*(server.wait_until_healthy() for server in servers))

        settings = {
            "steps": course.steps,
            "model": tied_model,
            "start_model.steps": "0",
            "serve.urls": f"[{', '.join(urls)}]",
            "rollout.groups_per_step": GROUPS,
            "rollout.group_size": GROUP_SIZE,
            "rollout.trajectories_per_task": 2,
            "score.scorer": "planted_scorer:PlantedScorer",
            "score.workers": 2,
            "score.timeout_s": 5,
            "evaluate.every": course.steps,
            "evaluate.scorer": "addition",
        }
        process = workplace.start(
            "run", "small", *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
        )

        def step() -> int:
            stored = rows(run, "rollouts")["step"]
            return -1 if stored.is_empty() else int(stored.max())

        await until(lambda: step() >= course.killed_in, process)
        await servers[1].kill()
        await until(lambda: step() >= course.started_in, process)
        servers[1].start()
        await until(lambda: step() >= course.awaited_in, process)
        proxies[0].is_open.clear()
        await until(servers[1].has_weights_of_a_run, process)
        proxies[0].is_open.set()
        output, _ = await asyncio.to_thread(process.communicate, timeout=900)
        (tmp_path / "output.txt").write_text(output)
        assert process.returncode == 0, output
    assert all(proxy.n_failed for proxy in proxies)
    check_stored(run, urls, course)


def check_stored(run: Path, urls: list[str], course: Course) -> None:
    """Every trajectory and every score once, each from a server that was there, the planted failures among them."""
    stored = rows(run, "rollouts")
    assert len(stored) == stored["trajectory_id"].n_unique() == course.steps * GROUPS * GROUP_SIZE
    sampled = stored.filter(pl.col("policy_version_first") >= 0)
    assert (sampled["policy_version_first"] == sampled["step"]).all()
    asked = stored.filter(pl.col("server") != "")
    before = asked.filter(pl.col("step") < course.killed_in)
    without = asked.filter(pl.col("step").is_between(course.killed_in + 1, course.started_in))
    after = asked.filter(pl.col("step") > course.awaited_in)
    assert set(before["server"]) == set(after["server"]) == set(urls)
    assert set(without["server"]) == {urls[0]}

    scores = rows(run, "scores")
    finished = stored.filter(pl.col("status").is_in(["complete", "truncated"]))
    assert sorted(scores["trajectory_id"]) == sorted(finished["trajectory_id"])
    failed = scores.filter(pl.col("status") == "failed")
    numbers = 1 + failed["group"].cast(pl.Int64) * GROUP_SIZE + failed["sample"].cast(pl.Int64)
    assert set(numbers) <= set(range(50, course.steps * GROUPS * GROUP_SIZE + 1, 50))
    assert set(failed["error_type"]) != {""}

    groups = rows(run, "groups")
    assert len(groups) == groups["group"].n_unique() == course.steps * GROUPS
    metrics = rows(run, "metrics")
    assert metrics.filter(pl.col("name") == "train/updated")["value"].sum() == course.steps
