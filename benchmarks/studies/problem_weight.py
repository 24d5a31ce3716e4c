"""Do a weight of problems, or stored groups, learn from fewer tokens? A few problems, again and again: each once an epoch, drawn by what was
seen of them, or with half of a step's groups stored ones.

The quickstart's model, or the calculator's, learns from 160 problems in steps of 32 groups of 8, over the real services, and is
evaluated on 512 other problems every third step. Counted are the sampled tokens until the mean held-out reward is .85, between the two
evaluations around it. A run has --steps, or half as many more, or twice as many, until it is there. Runs below --root are continued.
"""

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import polars as pl

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import load
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.resume import list_done_steps
from tests.stubs.prefect_server import prefect_server

ENVIRONMENTS = {"addition": "quickstart", "calculator": "calculator"}
CHOICES: dict[str, dict[str, object]] = {
    "uniform": {},
    "weighted": {"rollout.problem_weight": "coalesce(reward_std, 1) + 0.05"},
    "stored": {"rollout.replay.share": 0.5},
}
LENGTHS = 1.0, 1.5, 2.0
"""Times --steps: a run that has not reached the target continues."""
N_PROBLEMS, EVERY, TARGET = 160, 3, 0.85


class FewProblems:
    """An environment with the first training problems of another, and all its held-out ones."""

    def __init__(self, environment: str) -> None:
        self._inner = make_environment(load(ENVIRONMENTS[environment]).rollout)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def size(self, split: str) -> int:
        return N_PROBLEMS if split == "train" else self._inner.size("held_out")


class FewAdditions(FewProblems):
    def __init__(self) -> None:
        super().__init__("addition")


class FewCalculations(FewProblems):
    def __init__(self) -> None:
        super().__init__("calculator")


@dataclass(frozen=True, slots=True)
class Learned:
    """One run: held-out reward at its end, tokens to the target (infinite if it was not reached), share of the groups in the batches."""

    environment: str
    choice: str
    seed: int
    end: float
    tokens_to_target: float
    trained_share: float


def settings(environment: str, choice: str, seed: int, steps: int, root: Path) -> RunConfig:
    few = {"addition": FewAdditions, "calculator": FewCalculations}[environment]
    values: dict[str, object] = {
        "seed": seed,
        "steps": steps,
        "store.root": root,
        "rollout.environment": f"{few.__module__}:{few.__name__}",
        "evaluate.every": EVERY,
        "checkpoint.every": steps // 2,
        "observe.task_runs": "events",
    } | CHOICES[choice]
    return load(ENVIRONMENTS[environment], tuple(f"{name}={value}" for name, value in values.items()))


def measure(environment: str, choice: str, seed: int, steps: int, root: Path) -> Learned:
    """Run it until the target is reached, and read its figures. Steps that are stored are not done again."""
    for length in LENGTHS:
        learned = run(environment, choice, seed, round(length * steps), root)
        if learned.tokens_to_target < math.inf:
            break
    return learned


def run(environment: str, choice: str, seed: int, steps: int, root: Path) -> Learned:
    from rollmill.flows.checks.preflight import preflight
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported
    from rollmill.flows.run.folder import is_finished

    name = f"{environment}-{choice}-{seed}"
    folder = RunFolder(str(root / name))
    if not is_finished(folder) or len(list_done_steps(folder, read_manifest(folder))) < steps:
        config = settings(environment, choice, seed, steps, root)
        preflight(config)
        asyncio.run(post_train(name, config))
    rewards = (
        scan(folder, "evaluations", ["step", "greedy", "reward"])
        .filter(~pl.col("greedy"))
        .group_by("step")
        .agg(pl.col("reward").mean())
        .sort("step")
        .collect()
    )
    tokens = scan(folder, "rollouts", ["step", "n_completion_tokens"]).group_by("step").sum().sort("step")
    before = {0: 0} | {
        step + 1: total
        for step, total in tokens.with_columns(pl.col("n_completion_tokens").cum_sum()).collect().iter_rows()
    }
    groups = scan(folder, "groups", ["reason"]).collect()["reason"]
    points = [(before[version], reward) for version, reward in rewards.iter_rows()]
    return Learned(
        environment, choice, seed, points[-1][1], tokens_to(points), float((groups == "").sum()) / len(groups)
    )


def tokens_to(points: list[tuple[int, float]]) -> float:
    """Tokens at which the reward first reaches TARGET, on the line between the two evaluations around it; infinite: it does not."""
    for (tokens, reward), (next_tokens, next_reward) in pairwise(points):
        if next_reward >= TARGET:
            share = (TARGET - reward) / (next_reward - reward) if next_reward > reward else 1.0
            return tokens + max(0.0, share) * (next_tokens - tokens)
    return math.inf


def compare(root: Path, seeds: range, steps: int) -> Iterator[Learned]:
    for seed in seeds:
        for environment in ENVIRONMENTS:
            for choice in CHOICES:
                yield measure(environment, choice, seed, steps, root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folder that keeps the runs; a temporary one by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
        learned = []
        for each in compare(words.root or Path(folder), range(words.seeds), words.steps):
            learned.append(each)
            print(
                f"{each.environment:<11} {each.choice:<9} seed {each.seed}: {each.tokens_to_target:8.0f} tokens to {TARGET}, "
                f"{each.end:.3f} at the end, {each.trained_share:.2f} of the groups trained",
                flush=True,
            )
    ratios = {
        f"{environment}_{choice}_tokens_ratio": [
            chosen.tokens_to_target / uniform.tokens_to_target
            for uniform in learned
            for chosen in learned
            if (uniform.environment, uniform.choice, chosen.choice) == (environment, "uniform", choice)
            and (uniform.environment, uniform.seed) == (chosen.environment, chosen.seed)
        ]
        for environment in ENVIRONMENTS
        for choice in CHOICES
        if choice != "uniform"
    }
    figures = {"benchmark": "problem_weight"} | {name: median(each) for name, each in ratios.items()}
    print(json.dumps(figures | {"ratios": ratios, "runs": [asdict(each) for each in learned]}))


if __name__ == "__main__":
    main()
