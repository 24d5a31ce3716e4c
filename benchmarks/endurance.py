"""Does the flow's process grow? 300 steps of 512 trajectories through rollout, scoring and store, and its RSS.

Prefect, `post-train`, the data sets, the clients and the scorer's worker process are the product's, with a task run for
each rollout and each score; trainer and vLLM server are stubs in another process. A figure is the median of the
process's resident memory at the ends of the five steps up to that one.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.stubs.prefect_server import prefect_server
from benchmarks.stubs.trainer import StubTrainer
from benchmarks.stubs.vllm_server import StubVllmServer
from tasks.rollout.tokens import save_character_tokenizer
from tasks.serve.process import free_port

STEPS, FIRST = 300, 50
GROUPS, GROUP_SIZE, SLOTS = 64, 8, 256
ROLLOUT_S = 0.005
AROUND = 5
LOOK_S = 0.05
TARGET = 0.02
RUN = "endurance"


def flow(folder: Path, steps: int, task_runs: str, urls: tuple[str, str]) -> None:
    """Run post-train over the stubs; this is the process that is measured."""
    from flows.post_train import post_train  # Prefect reads its settings when it is imported
    from flows.settings import validate

    config = validate(
        {
            "steps": steps,
            "model": str(folder / "model"),
            "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_in_flight": SLOTS},
            "serve": {"urls": [urls[0]]},
            "train": {"url": urls[1]},
            "evaluate": {"every": steps, "n_prompts": 8},
            "store": {"root": str(folder / "runs")},
            "observe": {"task_runs": task_runs},
        }
    )
    asyncio.run(post_train(RUN, config))


def rss_mib(pid: int) -> float:
    """Resident memory of a process; ProcessLookupError when it is gone, or has ended and was not waited for."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    if not pages:
        raise ProcessLookupError(f"process {pid} has ended")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def watched(process: subprocess.Popen[bytes], run: Path, steps: int) -> list[float]:
    """[steps] MiB at the end of each step, as its metrics appear.

    Raises:
        RuntimeError: the flow failed, or ended before every step had its size.
    """
    sizes: list[float] = []
    while process.poll() is None and len(sizes) < steps:
        if (run / "metrics" / f"step={len(sizes):06d}").exists():
            try:
                sizes.append(rss_mib(process.pid))
            except ProcessLookupError:
                break
            if len(sizes) % 10 == 0:
                print(f"{len(sizes):6} steps {sizes[-1]:8.1f} MiB", flush=True)
        else:
            time.sleep(LOOK_S)
    if process.wait():
        raise RuntimeError(f"the flow ended with status {process.returncode}")
    if len(sizes) < steps:
        raise RuntimeError(f"the flow ended when {len(sizes)} of {steps} steps had been measured")
    return sizes


def measure(folder: Path, steps: int, task_runs: str) -> list[float]:
    """[steps] MiB of a flow over stubs."""
    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    trainer, server = StubTrainer(0.0, 0.0), StubVllmServer(model, ROLLOUT_S)
    ports = free_port(), free_port()
    controls = [server.serve(ports[0]), trainer.serve(ports[1])]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        command = [sys.executable, "-m", "benchmarks.endurance", "--flow", str(folder), *urls]
        options = ["--steps", str(steps), "--task-runs", task_runs]
        environment = os.environ | {"ROLLMILL_TRAINER_TOKEN": trainer.token}
        with (folder / "flow.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *options], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                return watched(process, folder / "runs" / RUN, steps)
            finally:
                process.kill()
                process.wait()
    finally:
        for control in controls:
            control.stop()


def around(sizes: list[float], step: int) -> float:
    return statistics.median(sizes[max(0, step - AROUND) : step])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first", type=int, default=FIRST, help="steps before the first figure")
    parser.add_argument("--task-runs", default="all", choices=("all", "groups", "events"))
    parser.add_argument("--flow", nargs=3, metavar=("FOLDER", "SERVER", "TRAINER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flow:
        folder, server, trainer = given.flow
        flow(Path(folder), given.steps, given.task_runs, (server, trainer))
        return
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "prefect"):
        started = time.monotonic()
        sizes = measure(Path(name), given.steps, given.task_runs)
        seconds = time.monotonic() - started
    first, last = around(sizes, given.first), around(sizes, given.steps)
    growth = last / first - 1.0
    print(f"{given.first} steps {first:.1f} MiB, {given.steps} steps {last:.1f} MiB, in {seconds:.0f} s")
    print(f"rss_growth: {growth:.4f}, target {TARGET:g}: {'reached' if growth <= TARGET else 'MISSED'}")
    figures = {
        "steps": given.steps,
        "rows": GROUPS * GROUP_SIZE,
        "rss_first_mib": round(first, 1),
        "rss_last_mib": round(last, 1),
        "rss_growth": round(growth, 4),
        "seconds": round(seconds, 1),
    }
    print(json.dumps({"benchmark": "endurance"} | figures))


if __name__ == "__main__":
    main()
