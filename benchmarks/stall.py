"""How long does a stream of tokens pause while new weights come? A real vLLM server with 61M parameters in fp32.

One client streams from /v1/completions; the longest gap between two of its tokens is taken around a sync: without one,
with ours in both modes, and with the way of systems that call, send and wait for every parameter while requests are
held. The sender is a thread here, over tcp on loopback, on the same cores. Each figure is the median of several syncs; the
least and the most are shown too.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.weights.gloo_pair import SENDER, open_pair, send
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.serve import vllm_launch
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.links.link import join_store, serve_store
from rollmill.tasks.sync.weight_messages import SendResult, SendTarget, WeightOffer
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.deepspeed_engine import Engine
from rollmill.tasks.train.service.launch import ServiceConfig
from rollmill.tasks.train.weight_transfer import WeightTransfer
from tests.stubs.one_server_sync import send_to_server

HOST, LINK, TIMEOUT_S = "127.0.0.1", "one-by-one", 60.0
MAX_TOKENS = 1024
BEFORE_TOKENS, AFTER_TOKENS = 30, 30
WAYS = ("none", "keep", "second_copy", "per_parameter")


class Loaded(NamedTuple):
    """What a Transfer asks of an engine."""

    model: torch.nn.Module


class Trainer:
    """One rank's end of the transfer, and the model whose weights it has."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=57,
                hidden_size=512,
                intermediate_size=1792,
                num_hidden_layers=16,
                num_attention_heads=8,
                num_key_value_heads=8,
                max_position_embeddings=MAX_TOKENS,
                tie_word_embeddings=True,
            )
        )
        self.model.save_pretrained(save_character_tokenizer(folder))
        config = ServiceConfig(train=TrainConfig(), sync=SyncConfig(), port=0, log_dir="")
        self._transfer = WeightTransfer(config, 0, 1)
        self._engine: Engine = Loaded(self.model)  # type: ignore[assignment]  # a transfer reads the model alone
        self._transfer.prepare(self._engine)

    async def offer(self) -> WeightOffer:
        return self._transfer.offer()

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        return await asyncio.to_thread(self._transfer.send, self._engine, targets)

    async def stop_sending(self, target: SendTarget) -> None:
        self._transfer.stop_sending(target.prefix)


class PerParameter:
    """The way of peers, on vLLM's own routes."""

    def __init__(self, trainer: Trainer, http: httpx.AsyncClient) -> None:
        self._weights = {
            name: each.detach() for name, each in trainer.model.named_parameters() if "lm_head" not in name
        }
        self._http = http
        self._store = serve_store(HOST, TIMEOUT_S)

    async def join(self) -> None:
        store = join_store(HOST, self._store.port, TIMEOUT_S)
        opening = asyncio.to_thread(open_pair, store, LINK, SENDER, HOST, TIMEOUT_S)
        self._link, _ = await asyncio.gather(
            opening, self._call("join", HOST, self._store.port, LINK, TIMEOUT_S)
        )

    async def sync(self) -> None:
        await self._post("/pause?mode=keep&clear_cache=true")
        await self._call("open_model")
        for name, tensor in self._weights.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            taking = asyncio.ensure_future(self._call("take_parameter", name, dtype, list(tensor.shape)))
            await asyncio.to_thread(send, self._link, tensor)
            await taking
        await self._call("close_model")
        await self._post("/resume")

    async def _call(self, method: str, *args: Any) -> None:
        await self._post("/collective_rpc", {"method": method, "args": list(args)})

    async def _post(self, path: str, body: Any = None) -> None:
        (await self._http.post(path, json=body)).raise_for_status()


class Gap(NamedTuple):
    """Of one stream: its longest gap, and the time from the sync's begin to the first token after its end."""

    longest_s: float
    first_new_token_s: float


async def measure_gap(http: httpx.AsyncClient, sync: Callable[[], Awaitable[Any]]) -> Gap:
    """Stream tokens, sync in their midst, and continue to stream for a while."""
    times: list[float] = []
    syncing: asyncio.Future[float] | None = None
    async for _ in tokens(http):
        times.append(time.perf_counter())
        if len(times) == BEFORE_TOKENS:
            syncing = asyncio.ensure_future(wait_until_over(sync))
        if syncing and syncing.done() and sum(at > syncing.result() for at in times) > AFTER_TOKENS:
            break
    assert syncing is not None
    assert syncing.done(), "the stream ended before the sync"
    begun, end = times[BEFORE_TOKENS - 1], syncing.result()
    gaps = [after - before for before, after in pairwise(times)]
    return Gap(max(gaps[BEFORE_TOKENS // 2 :]), next(at for at in times if at > end) - begun)


async def wait_until_over(sync: Callable[[], Awaitable[Any]]) -> float:
    await sync()
    return time.perf_counter()


async def tokens(http: httpx.AsyncClient) -> AsyncIterator[None]:
    body = {
        "model": "policy",
        "prompt": [5, 6, 7, 8],
        "max_tokens": MAX_TOKENS - 8,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[VllmClient]:
    extension = ("--worker-extension-cls", "benchmarks.stalls.one_by_one.OneByOne")
    config, port = (
        ServeConfig(dtype="float32", max_model_len=MAX_TOKENS, extra_args=extension),
        free_port(),
    )
    process = LaunchedProcess.start(
        "vLLM server",
        vllm_launch.vllm_command(config, str(folder / "model"), port),
        log=folder / "vllm.log",
        env={**vllm_launch.vllm_environment(config), "PYTHONPATH": str(Path(__file__).parents[1])},
        stop_grace_s=2.0,
    )
    try:
        async with VllmClient(f"http://{HOST}:{port}", config) as client:
            await client.wait_until_healthy(300.0, process)
            await client.warm_up(300.0, process)
            yield client
    finally:
        process.stop_now()


async def measure(folder: Path, repeats: int) -> dict[str, list[Gap]]:
    """Every way in turn, several times; the first time of each is not counted."""
    trainer = Trainer(folder / "model")
    async with server(folder) as client, httpx.AsyncClient(base_url=client.url, timeout=TIMEOUT_S) as http:
        one_by_one, prefix = PerParameter(trainer, http), create_prefix()
        await one_by_one.join()
        configs = {mode: SyncConfig(mode=mode, transport="tcp") for mode in ("keep", "second_copy")}
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "none": lambda: asyncio.sleep(0.5),
            "per_parameter": one_by_one.sync,
            **{
                mode: partial(send_to_server, trainer, client, "bench:1:1", config, prefix)
                for mode, config in configs.items()
            },
        }
        found: dict[str, list[Gap]] = {name: [] for name in WAYS}
        for number in range(repeats + 1):
            for name in WAYS:
                gap = await measure_gap(http, ways[name])
                if number:
                    found[name].append(gap)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(Path(name), parser.parse_args().repeats))
    print(f"{'':>14} {'longest gap between tokens, s':>32} {'first new token, s':>20}")
    print(f"{'':>14} {'least':>10} {'median':>10} {'most':>10} {'median':>20}")
    figures: dict[str, float] = {}
    for way, gaps in found.items():
        longest = [each.longest_s for each in gaps]
        least, median, first = (
            min(longest),
            statistics.median(longest),
            statistics.median(each.first_new_token_s for each in gaps),
        )
        print(f"{way:>14} {least:10.3f} {median:10.3f} {max(longest):10.3f} {first:20.3f}")
        figures |= {f"gap_{way}_s": round(median, 4), f"gap_{way}_least_s": round(least, 4)}
        if way == "second_copy":
            figures["first_new_token_s"] = round(first, 3)
    print(json.dumps({"benchmark": "stall"} | figures))


if __name__ == "__main__":
    main()
