"""By how much is the event loop later for a 1.2 GB hand-off, with 200 background tasks that keep it busy?

128 rows with routed experts go from a stub of a vLLM server through the product's client, rows and writer to shards, as in
`benchmarks.handoff` by arrays, while 200 tasks wait and compute a little in turn. For comparison, the same tasks alone,
for as long. The loop is sampled every millisecond by the product's monitor; missed beats count with what they were late. Passes
of both alternate, each in a separate process after the same warm-up; each figure is the median over the passes, and
excess is that of the hand-off minus that of the tasks alone. The server answers with the arrays of our plugin; `--base64`
adds the hand-off by vLLM's own JSON.

`loop_cpu_to_calibration` holds on other machines: CPU seconds of the loop's thread for the hand-off, without what the tasks
take, to those of a fixed loop of Python's in the same passes. It rises when work comes to the loop; waiting for a processor
or for the interpreter's lock is not in it.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.deliveries import ours
from benchmarks.deliveries.machine import touch_memory
from benchmarks.deliveries.requests import TIMEOUT_S, warm_up
from benchmarks.suite.calibration import calibration_cpu_s
from rollmill.tasks.observe.loop_lag import Beat, LoopLag
from rollmill.tasks.observe.process_memory import keep_for_good
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.rollout.trajectory import rollout_rows
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder

PASSES, TASKS = 5, 200
TURN_S, WORK_S = 0.05, 50e-6
"""Of a background task: seconds that it waits, and of the processor that it takes in a turn: a fifth of a core for all."""
ALONE_S = 3.0
TARGETS = {"lag_p99_excess_ms": 5.0, "lag_max_excess_ms": 30.0}
ALONE, HAND_OFF, BASE64 = "tasks alone", "with the hand-off", "with the hand-off, base64"
FORMS = {ALONE: "arrays", HAND_OFF: "arrays", BASE64: "json"}
"""The ways, and the form in which the server answers each."""
Figures = dict[str, float]


class BeatCpu:
    """CPU of the loop's thread by beat, by the thread's own clock: the kernel's statistics may charge it to a later one.

    Attributes:
        largest_ms: CPU of the latest one, in ms.
    """

    def __init__(self) -> None:
        self.largest_ms, self._latest_ms, self._before_s = 0.0, 0.0, time.thread_time()

    def heard(self, beat: Beat) -> None:
        """At each beat, on the loop's thread."""
        now_s = time.thread_time()
        if beat.lag_ms > self._latest_ms:
            self._latest_ms, self.largest_ms = beat.lag_ms, 1000.0 * (now_s - self._before_s)
        self._before_s = now_s


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
        calibration_s = calibration_cpu_s()
        with traffic():
            await asyncio.sleep(2 * TURN_S)
            beat_cpu, started, cpu_s = BeatCpu(), time.perf_counter(), time.thread_time()
            lag = LoopLag(on_beat=beat_cpu.heard)
            with lag.sample():
                if way == ALONE:
                    await asyncio.sleep(ALONE_S)
                else:
                    await ours.deliver(client, player, folder)
            seconds, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_s
    return {
        "lag_p50_ms": lag.lags.percentile_ms(50),
        "lag_p99_ms": lag.lags.percentile_ms(99),
        "lag_max_ms": lag.largest.lag_ms,
        "max_queued_ms": lag.largest.queued_ms,
        "max_cpu_ms": beat_cpu.largest_ms,
        "loop_cpu_s": cpu_s,
        "calibration_cpu_s": calibration_s,
        "seconds": seconds,
    }


def in_own_process(way: str) -> Figures:
    """Measure one pass of a way with a new server, in a separate process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        server = LaunchedProcess.start(
            "stub",
            [sys.executable, "-m", "tests.stubs.routing_server", str(port), FORMS[way]],
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


def excess(median: dict[str, Figures], way: str, suffix: str = "") -> Figures:
    """The lag of a way above that of the tasks alone."""
    return {
        f"{name}_excess{suffix}_ms": median[way][f"{name}_ms"] - median[ALONE][f"{name}_ms"]
        for name in ("lag_p99", "lag_max")
    }


def loop_cpu_s(median: dict[str, Figures]) -> float:
    """Return the CPU seconds of the loop's thread for the hand-off, without what the tasks use in the same time."""
    alone, both = median[ALONE], median[HAND_OFF]
    return both["loop_cpu_s"] - alone["loop_cpu_s"] * both["seconds"] / alone["seconds"]


def compare(n_passes: int, ways: Sequence[str]) -> None:
    """The ways in turn, so many times; prints the table and the JSON object."""
    passes: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(n_passes):
        for way, figures in passes.items():
            figures.append(in_own_process(way))
    median = {
        way: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for way, found in passes.items()
    }
    names = list(median[ALONE])
    print(f"{'':26}" + "".join(f"{name:>18}" for name in names))
    for way, middle in median.items():
        print(f"{way:26}" + "".join(f"{middle[name]:18.2f}" for name in names), flush=True)
    found = excess(median, HAND_OFF) | (excess(median, BASE64, "_base64") if BASE64 in median else {})
    found["loop_cpu_s"] = loop_cpu_s(median)
    found["loop_cpu_to_calibration"] = found["loop_cpu_s"] / median[HAND_OFF]["calibration_cpu_s"]
    for name, target in TARGETS.items():
        reached = "reached" if found[name] <= target else "MISSED"
        print(f"{name}: {found[name]:.2f}, target {target:g}: {reached}")
    print(json.dumps({"benchmark": "lag", "passes": n_passes} | found | {"ways": median}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="of each way")
    parser.add_argument("--base64", action="store_true", help="the hand-off by base64 too")
    parser.add_argument("--way", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(asyncio.run(one_pass(given.way, given.url, given.place))))
    else:
        compare(given.passes, [way for way in FORMS if given.base64 or way != BASE64])


if __name__ == "__main__":
    main()
