"""What does Rollmill itself add to a step? 64 groups of 8, over a trainer and a vLLM server that take no time.

Prefect's server, `post-train`, the data sets, the clients and the scorer's worker process are the product's; trainer and
vLLM server are stubs in another process, which answer at once. A step is from one training step's start to the next
one's: nothing of it is generation or training, so all of it is added, what the stubs take to answer included. CPU is
that of all threads of the flow's process, of the processes below it, and of the server's process tree. Each figure is the
median of the settled steps of one run; a row for each way in which Prefect can record a step. `flow_cpu_to_stubs` holds on
other machines: the stubs spend their CPU in the same seconds, on the other end of the same requests.
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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fanout import server_cpu_s
from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import TrainStep
from tests.stubs.prefect_server import prefect_server
from tests.stubs.toy_settings import validate_toy
from tests.stubs.trainer import StubTrainer
from tests.stubs.vllm_server import StubVllmServer

STEPS = 12
SETTLING_STEPS = 5
"""Steps at the beginning that are not counted: much is imported in the first, the run's page is drawn during the next ones,
which takes 2 CPU s once a minute at most, and the server is behind from the second."""
GROUPS, GROUP_SIZE, SLOTS = 64, 8, 256
TARGET_S = 1.0
TASK_RUNS = ("all", "groups", "events")
DEFAULT, WITHOUT_TASK_RUNS = "all", "events"
COLUMNS = ("recorded by", "added s", "flow CPU s", "below it", "server CPU s", "stubs CPU s")


class Moment(NamedTuple):
    """Seconds of the clock, and CPU seconds by then: of the flow, of the processes below it, of Prefect's server, here."""

    at: float
    flow_cpu: float
    below_cpu: float
    server_cpu: float
    here_cpu: float


@dataclass
class Stopwatch(StubTrainer):
    """A trainer that takes no time, and notes when each of its steps begins.

    Attributes:
        flow_pid: process of the flow; 0 until it is known.
        server_pid: process of Prefect's server.
        moments: one for each step.
    """

    flow_pid: int = 0
    server_pid: int = 0
    moments: list[Moment] = field(default_factory=list)

    def _train(self, command: TrainStep) -> StepResult:
        flow, all_of_it = own_cpu_s(self.flow_pid), server_cpu_s(self.flow_pid)
        rest = server_cpu_s(self.server_pid), time.process_time()
        self.moments.append(Moment(time.perf_counter(), flow, all_of_it - flow, *rest))
        return super()._train(command)


def own_cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def flow(folder: Path, steps: int, task_runs: str, urls: tuple[str, str]) -> None:
    """Run post-train over the stubs; this is the process that is measured."""
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported

    config = validate_toy(
        {
            "steps": steps,
            "model": str(folder / "model"),
            "rollout": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_in_flight": SLOTS},
            "serve": {"urls": [urls[0]]},
            "train": {"url": urls[1]},
            "evaluate": {"every": 0},
            "store": {"root": str(folder / "runs")},
            "observe": {"task_runs": task_runs},
        }
    )
    asyncio.run(post_train(task_runs, config))


def measure(folder: Path, steps: int, task_runs: str) -> dict[str, Any]:
    """Medians over the settled steps of a run."""
    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    running = local_server.status(Path(os.environ["PREFECT_HOME"]))
    assert running is not None
    trainer, stub = Stopwatch(0.0, 0.0, server_pid=running.pid), StubVllmServer(model, 0.0)
    ports = free_port(), free_port()
    controls = [stub.serve(ports[0]), trainer.serve(ports[1])]
    try:
        command = [sys.executable, "-m", "benchmarks.step_overhead", "--flow", str(folder)]
        command += [f"http://127.0.0.1:{port}" for port in ports]
        command += [task_runs, "--steps", str(steps)]
        environment = os.environ | {"ROLLMILL_TRAINER_TOKEN": trainer.token}
        with (folder / "flow.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                trainer.flow_pid = process.pid
                status = process.wait()
            finally:
                process.kill()
                process.wait()
        assert status == 0, (folder / "flow.log").read_text()
    finally:
        for control in controls:
            control.stop()
    steps_taken = [
        [after - before for before, after in zip(*moments, strict=True)]
        for moments in pairwise(trainer.moments)
    ]
    medians = map(statistics.median, zip(*steps_taken[SETTLING_STEPS - 1 :], strict=True))
    names = ("added_s", "flow_cpu_s", "below_cpu_s", "server_cpu_s", "stubs_cpu_s")
    figures = {name: round(value, 3) for name, value in zip(names, medians, strict=True)}
    return {"task_runs": task_runs} | figures


def row(figures: dict[str, Any]) -> str:
    kind, *measured = figures.values()
    shown = [kind, *(f"{value:.2f}" for value in measured)]
    return " | ".join(f"{each!s:>12}" for each in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--task-runs", default=TASK_RUNS, nargs="+", choices=TASK_RUNS)
    hidden = ("FOLDER", "SERVER", "TRAINER", "TASK_RUNS")
    parser.add_argument("--flow", help=argparse.SUPPRESS, nargs=len(hidden), metavar=hidden)
    given = parser.parse_args()
    if given.flow:
        folder, stub, trainer, task_runs = given.flow
        flow(Path(folder), given.steps, task_runs, (stub, trainer))
        return
    print(" | ".join(f"{name:>12}" for name in COLUMNS))
    rows = []
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "prefect"):
        for task_runs in given.task_runs:
            rows.append(measure(Path(name) / task_runs, given.steps, task_runs))
            print(row(rows[-1]), flush=True)
    print_verdict(rows)


def print_verdict(rows: list[dict[str, Any]]) -> None:
    """Print what became of the target, and the JSON object."""
    for each in rows:
        verdict = "reached" if each["flow_cpu_s"] <= TARGET_S else "MISSED"
        print(f"flow_cpu_s ({each['task_runs']}): {each['flow_cpu_s']:.2f}, target {TARGET_S:g}: {verdict}")
    by_way = {each["task_runs"]: each for each in rows}
    reported = by_way.get(DEFAULT, rows[0])
    figures = {name: reported[name] for name in ("added_s", "flow_cpu_s", "server_cpu_s")}
    figures["flow_cpu_to_stubs"] = reported["flow_cpu_s"] / reported["stubs_cpu_s"]
    if without := by_way.get(WITHOUT_TASK_RUNS):
        figures["flow_cpu_events_s"] = without["flow_cpu_s"]
    work = {"trajectories": GROUPS * GROUP_SIZE, "rows": rows}
    print(json.dumps({"benchmark": "step_overhead"} | work | figures))


if __name__ == "__main__":
    main()
