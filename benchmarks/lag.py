"""By how much is the event loop later for a 1.2 GB hand-off, beside 200 background tasks that keep it busy?

128 rows with routed experts go from a stub of a vLLM server through the product's client, rows and writer to shards, as in
`benchmarks.handoff` by arrays, while 200 tasks wait and compute a little in turn. Beside it the same tasks alone, for as
long. The loop is sampled every millisecond by the product's monitor; missed beats count with what they were late. Passes
of both take turns, each in a process of its own after the same warm-up; each figure is the median over the passes, and
excess is that of the hand-off above that of the tasks alone.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.deliveries import ours
from benchmarks.deliveries.machine import touch_memory
from benchmarks.deliveries.requests import TIMEOUT_S, warm_up
from tasks.observe.lag import LoopLag
from tasks.observe.memory import keep_for_good
from tasks.rollout.trajectory import rollout_rows
from tasks.serve.client import VllmClient
from tasks.serve.config import ServeConfig
from tasks.serve.process import LaunchedProcess, free_port
from tasks.store.layout import RunFolder

PASSES, TASKS = 5, 200
TURN_S, WORK_S = 0.05, 50e-6
"""Of a background task: seconds that it waits, and of the processor that it takes in a turn: a fifth of a core for all."""
ALONE_S = 3.0
TARGETS = {"lag_p99_excess_ms": 5.0, "lag_max_excess_ms": 30.0}
WAYS = ("tasks alone", "with the hand-off")
Figures = dict[str, float]


async def busy(number: int) -> None:
    """One background task: as live traffic does, it waits, and has a little to do."""
    await asyncio.sleep(TURN_S * number / TASKS)  # they do not all begin at once
    while True:
        until = time.perf_counter() + WORK_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(TURN_S)


@contextmanager
def traffic() -> Iterator[None]:
    """The background tasks, while inside."""
    tasks = [asyncio.ensure_future(busy(number)) for number in range(TASKS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def one_pass(way: str, url: str, place: Path) -> Figures:
    """The lag of one pass; the server and the warm-up are there in both ways."""
    async with VllmClient(url, ServeConfig()) as client:
        await client.wait_until_healthy(TIMEOUT_S)
        player, folder = ours.player_of(place), RunFolder(place / "run")
        folder.tmp.mkdir(parents=True)
        rollout_rows(ours.RUN, ours.STEP, "addition", [])  # imports what Arrow imports at its first array
        await warm_up(client)
        keep_for_good()  # as when a run is open
        touch_memory(place)
        with traffic():
            await asyncio.sleep(2 * TURN_S)
            lag, started = LoopLag(), time.perf_counter()
            with lag.sampled():
                if way == WAYS[0]:
                    await asyncio.sleep(ALONE_S)
                else:
                    await ours.deliver(client, player, folder)
            seconds = time.perf_counter() - started
    return {
        "lag_p50_ms": lag.lags.percentile_ms(50),
        "lag_p99_ms": lag.lags.percentile_ms(99),
        "lag_max_ms": lag.largest_ms,
        "max_queued_ms": lag.largest.queued_ms,
        "max_running_ms": lag.largest.running_ms,
        "seconds": seconds,
    }


def in_own_process(way: str) -> Figures:
    """One pass of a way, with a server of its own."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        server = LaunchedProcess.start(
            "stub",
            [sys.executable, "-m", "benchmarks.stubs.routing_server", str(port), "arrays"],
            log=Path(place) / "log",
            stop_grace_s=2.0,
        )
        try:
            command = [sys.executable, "-m", "benchmarks.lag", "--way", way, "--place", place]
            done = subprocess.run(
                [*command, "--url", f"http://127.0.0.1:{port}"],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        finally:
            server.stop_now()
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(n_passes: int) -> None:
    """Both ways in turn, so many times; prints the table and the JSON object."""
    passes: dict[str, list[Figures]] = {way: [] for way in WAYS}
    for _ in range(n_passes):
        for way, found in passes.items():
            found.append(in_own_process(way))
    median = {
        way: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for way, found in passes.items()
    }
    names = list(median[WAYS[0]])
    print(f"{'':20}" + "".join(f"{name:>16}" for name in names))
    for way, figures in median.items():
        print(f"{way:20}" + "".join(f"{figures[name]:16.2f}" for name in names), flush=True)
    alone, both = (median[way] for way in WAYS)
    excess = {
        f"{name}_excess_ms": both[f"{name}_ms"] - alone[f"{name}_ms"] for name in ("lag_p99", "lag_max")
    }
    for name, target in TARGETS.items():
        print(
            f"{name}: {excess[name]:.2f}, target {target:g}: {'reached' if excess[name] <= target else 'MISSED'}"
        )
    print(json.dumps({"benchmark": "lag", "passes": n_passes} | excess | {"ways": median}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="of each way")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(asyncio.run(one_pass(given.way, given.url, given.place))))
    else:
        compare(given.passes)


if __name__ == "__main__":
    main()
