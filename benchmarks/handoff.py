"""What does it cost to bring a 1.21 GB batch from HTTP responses to the trainer? 128 rows of 23,600 tokens, 48 x 8 experts.

A stub of a vLLM server in another process answers at once, at most 8 requests in flight. Ours is the product's client,
rows, writer and reader, by vLLM's JSON with base64 and by the arrays of our plugin; beside it the batch as one message:
structs of Python lists, gathered and encoded in a thread by msgspec (MessagePack) and by orjson, and written to a file.
Each way runs in a process of its own. Decoding (JSON, base64) is told apart from the rest; the rest includes HTTP and the
kernel's writing: what receiving alone and writing as many bytes alone cost stands beside it.
"""

import asyncio
import base64
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.stubs.loop_lag import LoopLag, idle_lag_ms
from benchmarks.stubs.routing_server import N_PROMPT
from tasks.observe.memory import keep_for_good
from tasks.rollout.environment import Example
from tasks.rollout.group import StepSampler
from tasks.rollout.trajectory import Draft, Trajectory, Work, rollout_rows
from tasks.serve import client as client_module
from tasks.serve.answers import Completion, completion_of
from tasks.serve.client import VllmClient
from tasks.serve.config import ServeConfig
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.filesystem import files_of
from tasks.store.layout import RunFolder
from tasks.store.reader import read
from tasks.store.routing import read_routing
from tasks.store.rows import Rows
from tasks.store.writer import RunWriter

N_ROWS, IN_FLIGHT = 128, 8
WAYS = ("ours, base64", "ours, arrays", "msgpack", "orjson")
TARGETS = {"cpu_s": 0.6, "lag_excess_ms": 10.0, "peak_rss_gb": 1.5, "read_column_s": 0.01}
FIELDS = ("cpu_s", "decode_cpu_s", "wall_s", "lag_excess_ms", "peak_rss_gb", "read_column_s")
BESIDE = ("receive_cpu_s", "plain_write_cpu_s", "read_routing_s")
TOUCHED_BYTES = 3_000_000_000
ROW_BYTES = 9_450_000
PROMPT = np.arange(N_PROMPT, dtype=np.int32)


class Decoding:
    """Stands in the client's place for decoding; counts its CPU seconds."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def __call__(self, body: Any) -> Completion:
        started = time.thread_time()
        completion = completion_of(body)
        self.cpu_s += time.thread_time() - started
        return completion


def rss_gb() -> float:
    """Most resident memory so far; pages of files that are mapped count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


async def each_row(client: VllmClient, done: Callable[[int, Completion], Awaitable[None]]) -> None:
    """All rows, at most IN_FLIGHT at once, each handed on the moment it is there."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> None:
        async with slots:
            completion = await client.generate(
                PROMPT, max_tokens=23_000, temperature=1.0, seed=number, timeout_s=120.0
            )
            await done(number, completion)

    async with asyncio.TaskGroup() as rows:
        for number in range(N_ROWS):
            rows.create_task(one(number))


def trajectory_of(number: int, completion: Completion) -> Trajectory:
    draft = Draft()
    draft.add_context(PROMPT)
    spans = [(start, 0) for start, _ in completion.version_spans]
    draft.add_completion(completion.token_ids, completion.logprobs, spans, completion.finish_reason)
    assert completion.routed_experts is not None
    draft.add_routing(completion.routed_experts)
    return draft.ended(
        Work(f"run.0.{number}.0", 0, number, 0, Example("0", {"answer": "85"}), number, 1.0),
        "complete",
        started_at=datetime.now(UTC),
        duration_s=1.0,
        queue_s=0.0,
        outcome={},
        error_type="",
        error="",
    )


class Nothing:
    """An environment in name alone."""

    name = "benchmark"
    tools = stop = ()


async def ours(client: VllmClient, folder: RunFolder) -> None:
    folder.tmp.mkdir(parents=True)
    async with RunWriter(files_of(folder), 1, 0.02) as writer:

        def keep(rows: Rows) -> Awaitable[None]:
            return writer.append("rollouts", rows, step=0)

        def keep_beside(dataset: str, rows: Rows) -> Awaitable[None]:
            return writer.append(dataset, rows, step=0)

        player: Any = type("Player", (), {"environment": Nothing()})()
        admission: Any = None
        sampler = StepSampler(player, admission, "run", 0, keep, keep_beside, keeps_routing=True)
        acknowledgements: list[Awaitable[None]] = []

        async def done(number: int, completion: Completion) -> None:
            await sampler.store(trajectory_of(number, completion), acknowledgements)

        await each_row(client, done)
        await asyncio.gather(*acknowledgements)


class Sample(msgspec.Struct):
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    experts: bytes
    shape: tuple[int, ...]


def sample_of(completion: Completion) -> Sample:
    n = len(completion.token_ids)
    experts = completion.routed_experts
    assert experts is not None
    return Sample(
        [*PROMPT.tolist(), *completion.token_ids.tolist()],
        [False] * len(PROMPT) + [True] * n,
        [0.0] * len(PROMPT) + completion.logprobs.tolist(),
        experts.tobytes(),
        experts.shape,
    )


def as_orjson(samples: Sequence[Sample]) -> bytes:
    import orjson

    plain = [
        {
            "token_ids": each.token_ids,
            "loss_mask": each.loss_mask,
            "logprobs": each.logprobs,
            "experts": base64.b64encode(each.experts).decode(),
            "shape": each.shape,
        }
        for each in samples
    ]
    return orjson.dumps(plain)


async def one_message(client: VllmClient, path: Path, encode: Callable[[Sequence[Sample]], bytes]) -> None:
    samples: list[Sample] = []

    async def done(number: int, completion: Completion) -> None:
        samples.append(sample_of(completion))

    await each_row(client, done)
    await asyncio.to_thread(lambda: path.write_bytes(encode(samples)))


def read_ours(folder: RunFolder) -> dict[str, float]:
    """A column read by a process that has it from disk alone, and the routed experts of all rows."""
    read(folder, "rollouts", ["step"], step=0)
    started = time.perf_counter()
    column = read(folder, "rollouts", ["logprobs"], step=0)["logprobs"]
    read_column_s = time.perf_counter() - started
    assert len(column) == N_ROWS
    started = time.perf_counter()
    experts = read_routing(folder, 0, [f"run.0.{number}.0" for number in range(N_ROWS)])
    read_routing_s = time.perf_counter() - started
    assert sum(each.nbytes for each in experts) > 1e9
    return {"read_column_s": read_column_s, "read_routing_s": read_routing_s}


def read_message(path: Path, way: str) -> dict[str, float]:
    """The same column of the one message: it has no columns, so all of it is decoded."""
    import orjson

    started = time.perf_counter()
    body = path.read_bytes()
    if way == "msgpack":
        logprobs = [each.logprobs for each in msgspec.msgpack.decode(body, type=list[Sample])]
    else:
        logprobs = [each["logprobs"] for each in orjson.loads(body)]
    np.concatenate([np.array(each, np.float32) for each in logprobs])
    return {"read_column_s": time.perf_counter() - started}


async def hand_off(way: str, url: str, place: Path) -> dict[str, float]:
    decoding = Decoding()
    rollout_rows("run", 0, "benchmark", [])  # imports what Arrow imports at its first array
    async with VllmClient(url, ServeConfig()) as client:
        await client.wait_until_healthy(60.0)
        receive_cpu_s = await receive_only(client)
        client_module.completion_of = decoding
        keep_for_good()  # as when a run is open
        idle_ms = await idle_lag_ms(2.0)
        touch_memory(place)
        lag, cpu, started = LoopLag(), time.process_time(), time.perf_counter()
        with lag.sampled():
            if way.startswith("ours"):
                await ours(client, RunFolder(place / "run"))
            else:
                await one_message(
                    client, place / "batch", msgspec.msgpack.encode if way == "msgpack" else as_orjson
                )
        wall_s, whole_cpu_s = time.perf_counter() - started, time.process_time() - cpu
    peak_rss_gb = rss_gb()
    return {
        "cpu_s": whole_cpu_s - decoding.cpu_s,
        "decode_cpu_s": decoding.cpu_s,
        "wall_s": wall_s,
        "lag_excess_ms": lag.largest_ms - idle_ms,
        "peak_rss_gb": peak_rss_gb,
        "receive_cpu_s": receive_cpu_s,
        "plain_write_cpu_s": plain_write_cpu_s(place),
    }


async def receive_only(client: VllmClient) -> float:
    """CPU seconds of receiving the same answers and dropping them."""
    nothing = Completion(PROMPT, PROMPT, "stop", ())
    client_module.completion_of = lambda _: nothing
    started = time.process_time()
    await each_row(client, dropped)
    return time.process_time() - started


async def dropped(number: int, completion: Completion) -> None:
    """Nothing is done with it."""


def plain_write_cpu_s(place: Path) -> float:
    """CPU seconds of writing as many bytes, from one piece of memory to a file."""
    touch_memory(place)
    file, row = place / "plain", bytes(ROW_BYTES)
    started = time.process_time()
    with file.open("wb", buffering=0) as sink:
        for _ in range(N_ROWS):
            sink.write(row)
    spent = time.process_time() - started
    file.unlink()
    return spent


def touch_memory(place: Path) -> None:
    """Have the machine's free memory backed: a virtual machine pays seconds for the first touch of what it gave back."""
    file, piece = place / "touched", bytes(1 << 24)
    with file.open("wb", buffering=0) as sink:
        for _ in range(TOUCHED_BYTES // len(piece)):
            sink.write(piece)
    file.unlink()


def in_own_process(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.handoff", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(way: str) -> dict[str, float]:
    form = "arrays" if way == "ours, arrays" else "json"
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        server = LaunchedProcess.start(
            "stub",
            [sys.executable, "-m", "benchmarks.stubs.routing_server", str(port), form],
            log=Path(place) / "log",
            stop_grace_s=2.0,
        )
        try:
            figures = in_own_process(way, f"http://127.0.0.1:{port}", place)
        finally:
            server.stop_now()
        return figures | in_own_process(way, "read", place)


def main() -> None:
    print(f"{'':16}" + "".join(f"{name:>19}" for name in (*FIELDS, *BESIDE)))
    found: dict[str, dict[str, float]] = {}
    for way in sys.argv[1:2] or WAYS:
        found[way] = measured(way)
        shown = (found[way].get(name, float("nan")) for name in (*FIELDS, *BESIDE))
        print(f"{way:16}" + "".join(f"{value:19.3f}" for value in shown), flush=True)
    own = found.get("ours, base64", next(iter(found.values())))
    for name, target in TARGETS.items():
        print(f"{name}: {own[name]:.3f}, target {target:g}: {'reached' if own[name] <= target else 'MISSED'}")
    print(json.dumps({"benchmark": "handoff"} | own | {"ways": found}))


if __name__ == "__main__":
    if len(sys.argv) < 3:  # a way alone: only that one
        main()
    elif sys.argv[2] == "read":
        at = Path(sys.argv[3])
        is_ours = sys.argv[1].startswith("ours")
        print(
            json.dumps(
                read_ours(RunFolder(at / "run")) if is_ours else read_message(at / "batch", sys.argv[1])
            )
        )
    else:
        print(json.dumps(asyncio.run(hand_off(sys.argv[1], sys.argv[2], Path(sys.argv[3])))))
