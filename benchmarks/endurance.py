"""Does a long run grow, or lag more and more? 300 steps of 512 trajectories through rollout, scoring and store.

Prefect, `post-train`, the data sets, the clients and the scorer's worker process are the product's, with a task run for
each rollout and each score; trainer and vLLM server are stubs in another process. What is shown is what the run has in
its own metrics: resident memory of each process after each step, and by how much the flow's event loop was late. A
figure is the median of the five steps up to that one.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl

from rollmill.tasks.observe.process_memory import MIB, own_rss_bytes
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from tests.stubs.prefect_server import prefect_server
from tests.stubs.toy_settings import validate_toy
from tests.stubs.trainer import StubTrainer
from tests.stubs.vllm_server import StubVllmServer

STEPS, FIRST = 300, 50
GROUPS, GROUP_SIZE = 64, 8
SLOTS, ROLLOUT_S = 256, 0.005
AROUND = 5
TARGET = 0.02
RUN = "endurance"
MEMORY = {"memory/flow_rss_bytes": "flow", "memory/scoring_rss_bytes": "scorer's worker"}
LAGS = {"loop/lag_p50_ms": "p50", "loop/lag_p99_ms": "p99", "loop/lag_max_ms": "max"}
MARKS = 10
"""Rows of the table."""

Series = Mapping[str, np.ndarray]
"""[steps] float64 values by metric."""


def flow(folder: Path, steps: int, groups: int, urls: tuple[str, str]) -> None:
    """Run post-train over the stubs; this is the process that is measured."""
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported

    config = validate_toy(
        {
            "steps": steps,
            "model": str(folder / "model"),
            "rollout": {"groups_per_step": groups, "group_size": GROUP_SIZE, "max_in_flight": SLOTS},
            "serve": {"urls": [urls[0]]},
            "train": {"url": urls[1]},
            "evaluate": {"every": steps, "n_prompts": 8},
            "store": {"root": str(folder / "runs")},
        }
    )
    asyncio.run(post_train(RUN, config))


def series_of(run: RunFolder, steps: int) -> Series:
    """What a run has in its metrics of memory and lag.

    Raises:
        RuntimeError: a step is without them.
    """
    rows = (
        scan(run, "metrics", ["step", "name", "value"])
        .filter(pl.col("name").is_in([*MEMORY, *LAGS]))
        .collect()
    )
    series = {}
    for name in (*MEMORY, *LAGS):
        values = (
            rows.filter(pl.col("name") == name).unique("step", keep="last").sort("step")["value"].to_numpy()
        )
        if len(values) != steps:
            raise RuntimeError(f"{name} was measured of {len(values)} steps, and the run had {steps}")
        series[name] = values
    return series


def measure(folder: Path, steps: int, groups: int) -> Series:
    """Run over stubs in a separate process.

    Raises:
        RuntimeError: the flow failed, or a step is without its figures.
    """
    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    trainer, server = StubTrainer(0.0, 0.0), StubVllmServer(model, ROLLOUT_S)
    ports = free_port(), free_port()
    controls = [server.serve(ports[0]), trainer.serve(ports[1])]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.endurance", "--flow", str(folder), *urls]
    options = ["--steps", str(steps), "--groups", str(groups)]
    environment = os.environ | {"ROLLMILL_TRAINER_TOKEN": trainer.token}
    try:
        done = subprocess.run([*command, *options], env=environment, check=False)
    finally:
        for control in controls:
            control.stop()
    if done.returncode:
        raise RuntimeError(f"the flow ended with status {done.returncode}")
    print(f"the stubs' process has {own_rss_bytes() / MIB:.0f} MiB")
    return series_of(RunFolder(folder / "runs" / RUN), steps)


def around(values: np.ndarray, step: int) -> float:
    """The median of the last steps up to one, counted from 1."""
    return float(np.median(values[max(0, step - AROUND) : step]))


def draw(series: Series, path: Path) -> None:
    """A picture of memory and lag by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    memory, lag = figure.subplots(2, 1, sharex=True)
    steps = np.arange(1, len(next(iter(series.values()))) + 1)
    for name, label in MEMORY.items():
        memory.plot(steps, series[name] / MIB, label=label)
    for name, label in LAGS.items():
        lag.plot(steps, series[name], label=label, linewidth=1.0)
    memory.set(ylabel="resident memory, MiB", ylim=(0.0, None))
    lag.set(xlabel="step", ylabel="lag of the flow's loop, ms", yscale="log")
    for axes in (memory, lag):
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", ncols=3, fontsize="small")
    figure.savefig(path, dpi=120)


def print_table(series: Series, steps: int) -> None:
    labels = [*MEMORY.values(), *(f"lag {label} ms" for label in LAGS.values())]
    print(f"{'step':>6}" + "".join(f"{label:>17}" for label in labels))
    for step in sorted({max(1, steps * mark // MARKS) for mark in range(1, MARKS + 1)}):
        sizes = [around(series[name], step) / MIB for name in MEMORY]
        lags = [around(series[name], step) for name in LAGS]
        print(f"{step:6}" + "".join(f"{value:17.1f}" for value in (*sizes, *lags)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--first", type=int, default=FIRST, help="step of the first figure")
    parser.add_argument("--groups", type=int, default=GROUPS, help="of a step")
    parser.add_argument("--picture", type=Path, help="file for a picture of memory and lag by step")
    parser.add_argument("--flow", nargs=3, metavar=("FOLDER", "SERVER", "TRAINER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flow:
        folder, server, trainer = given.flow
        flow(Path(folder), given.steps, given.groups, (server, trainer))
        return
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "prefect"):
        started = time.monotonic()
        series = measure(Path(name), given.steps, given.groups)
        seconds = time.monotonic() - started
    print_table(series, given.steps)
    if given.picture:
        draw(series, given.picture)
    rss = series["memory/flow_rss_bytes"]
    first, last = around(rss, min(given.first, given.steps)), around(rss, given.steps)
    growth = last / first - 1.0
    print(f"rss_growth: {growth:.4f}, target {TARGET:g}: {'reached' if growth <= TARGET else 'MISSED'}")
    figures = {
        "steps": given.steps,
        "rows": given.groups * GROUP_SIZE,
        "rss_first_mib": round(first / MIB, 1),
        "rss_last_mib": round(last / MIB, 1),
        "rss_growth": round(growth, 4),
        **{name.removeprefix("loop/"): round(float(np.median(series[name])), 2) for name in LAGS},
        "seconds": round(seconds, 1),
    }
    print(json.dumps({"benchmark": "endurance"} | figures))


if __name__ == "__main__":
    main()
