"""What is a training step's arithmetic worth? Tokens by CPU second of ours, of a bare loop, and of trl's GRPOTrainer.

32 rows in groups of 8, prompts of 64 tokens, completions lognormal (sigma 0.8, mean 200, at most 512), on one thread each.
Ours is the product's engine and step on one rank, in both layouts, all else as by default; the bare loop takes
length-sorted micro-batches of 4 rows and runs the head on completion tokens only; trl is fed through `rollout_func`, 4 rows
at a time, with the 5M model. Everybody makes the same update of the same weights: gradients of the first step are compared.
The ways make their steps by turns, and the quickest step of each counts; ours is the layout that `train.layout: auto`
uses, varlen. Tokens are those of the rows, a shared prompt as often as it occurs. Memory is the largest resident size after the first step, libraries included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import load_file

from benchmarks.peers.environment import FILES, PeerError, environment_of, peer_variables
from benchmarks.trainer import work

REPEATS = {"5M": 4, "58M": 1}
"""Measured steps of each way, after one that is not, by model; the larger one takes half a minute a step."""
WAYS: dict[str, dict[str, object]] = {
    "bare": {},
    "padded": {"layout": "padded"},
    "varlen": {"layout": "varlen"},
}
TRL = "trl-1.16.0"
TARGETS = {"ratio_to_bare": 0.9, "ratio_to_trl": 2.8}
Figures = dict[str, float]


class Process:
    """A way of training, in a process that makes a step on each request."""

    def __init__(self, way: str, folder: Path) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        if way == "trl":
            words = [environment_of(TRL), "-P", FILES / "trl_steps.py", folder]
            variables = peer_variables() | {"OMP_NUM_THREADS": "1"}
        else:
            words = [sys.executable, "-m", "benchmarks.trainer.worker", way, folder, json.dumps(WAYS[way])]
        self._way, self._log = way, folder / f"{way}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
            )

    def step(self) -> Figures:
        """CPU seconds and peak memory of one more step.

        Raises:
            PeerError: it failed; with what it said.
        """
        given, said = self._pipes
        try:
            print(file=given, flush=True)
        except BrokenPipeError:
            line = ""
        else:
            line = next((each for each in said if each.startswith("{")), "")
        if not line:
            raise PeerError(f"{self._way} ended:\n{self._log.read_text()[-4000:]}")
        figures: Figures = json.loads(line)
        return figures

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        given, said = self._process.stdin, self._process.stdout
        assert given is not None
        assert said is not None
        return given, said

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def measure(size: str, ways: list[str], repeats: int) -> dict[str, Figures]:
    """Every way's quickest step, its memory, and how far its gradient is from the bare loop's."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        n_tokens = work.make(folder, size)
        processes: dict[str, Process] = {}
        try:
            steps: list[dict[str, Figures]] = [{}]
            for way in ways:
                processes[way] = Process(way, folder)
                steps[0][way] = processes[way].step()
            steps += [{way: each.step() for way, each in processes.items()} for _ in range(repeats - 1)]
        finally:
            for each in processes.values():
                each.stop()
        return {
            way: {
                "cpu_s": (least := min(step[way]["cpu_s"] for step in steps)),
                "tokens_per_cpu_s": n_tokens / least,
                "peak_mb": max(step[way]["peak_mb"] for step in steps),
                "gradient_difference": difference(folder, way),
            }
            for way in ways
        }


def difference(folder: Path, way: str) -> float:
    """Norm of the difference of a way's first gradient to the bare loop's, to the norm of that; the worst tensor."""
    found, expected = (load_file(folder / f"{name}.safetensors") for name in (way, "bare"))
    assert found.keys() == expected.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


def compare(sizes: list[str], has_peers: bool) -> None:
    """Prints the table and the JSON object."""
    found = {
        size: measure(size, [*WAYS, *(["trl"] if has_peers and size == "5M" else [])], REPEATS[size])
        for size in sizes
    }
    print(f"{'':16}{'CPU s':>10}{'tokens/CPU s':>14}{'to bare':>10}{'peak MB':>10}{'gradient':>10}")
    ratios: dict[str, dict[str, float]] = {}
    for size, ways in found.items():
        bare = ways["bare"]["cpu_s"]
        ratios[size] = {way: bare / figures["cpu_s"] for way, figures in ways.items()}
        for way, each in ways.items():
            texts = f"{each['cpu_s']:10.2f}{each['tokens_per_cpu_s']:14.0f}{ratios[size][way]:10.2f}"
            print(f"{size} {way:12}{texts}{each['peak_mb']:10.0f}{each['gradient_difference']:10.1e}")
    figures = {"ratio_to_bare": min(each["varlen"] for each in ratios.values())}
    if "trl" in (small := ratios[sizes[0]]):
        figures["ratio_to_trl"] = small["varlen"] / small["trl"]
    for name, value in figures.items():
        reached = "reached" if value >= TARGETS[name] else "MISSED"
        print(f"{name}: {value:.2f}, target {TARGETS[name]:g}: {reached}")
    print(json.dumps({"benchmark": "train_step"} | figures | {"sizes": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=REPEATS, default=list(REPEATS))
    parser.add_argument(
        "--no-peers", action="store_true", help="ours and the bare loop: nothing is installed"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    compare(given.sizes, not given.no_peers)


if __name__ == "__main__":
    main()
