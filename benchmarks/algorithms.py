"""Does every algorithm learn? The quickstart for 20 steps with each of conf/algorithms, over the real services.

One seed; the start model is the same for all. Held-out reward is that of one sampled answer to each of 512 problems. The
curves go into one picture. Runs that are finished below --root are read, not done again.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl
from matplotlib.figure import Figure

from rollmill.flows.configuration.presets import ALGORITHMS
from rollmill.flows.configuration.settings import load
from rollmill.tasks.store.folders import RunFolder
from tests.stubs.prefect_server import prefect_server

STEPS = 20
SETTINGS = (
    f"steps={STEPS}",
    f"evaluate.every={STEPS}",
    f"checkpoint.every={STEPS}",
    "observe.task_runs=events",
)
OF_TASK = {"dapo": ("score.overlong_tokens=[20, 24]",)}
"""What an algorithm needs to know of the task's longest completion, which is 24 tokens."""


COMPARED = sorted(each.stem for each in ALGORITHMS.glob("*.yaml") if each.stem != "distill")
"""All but the one that needs a teacher."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Held-out rewards at the start and at the end, and the training reward of every step."""

    algorithm: str
    start: float
    end: float
    rewards: tuple[float, ...]


def measure(algorithm: str, root: Path, seed: int) -> Learned:
    """Run the quickstart with an algorithm, unless that is done, and read its curves."""
    from rollmill.flows.checks.preflight import preflight
    from rollmill.flows.configuration.recipe import start_model_folder
    from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported
    from rollmill.flows.run.folder import is_finished
    from rollmill.tasks.look.tables.curves import read_curves

    folder = RunFolder(str(root / algorithm))
    if not is_finished(folder):
        overrides = (*SETTINGS, *OF_TASK.get(algorithm, ()), f"seed={seed}", f"store.root={root}")
        config = load(f"quickstart+{algorithm}", overrides)
        preflight(config)
        print(f"{algorithm}: from {start_model_folder(config)}", flush=True)
        asyncio.run(post_train(algorithm, config))
    curves = read_curves(folder)
    held_out = dict(zip(curves.held_out["step"], curves.held_out["reward"], strict=True))
    rewards = tuple(curves.groups.sort("step")["reward"].to_list())
    return Learned(algorithm, held_out[0], held_out[STEPS], rewards)


def draw(learned: Sequence[Learned], path: Path) -> None:
    """Training reward by step as lines, held-out reward at start and end as dots."""
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axis = figure.subplots()
    for number, each in enumerate(sorted(learned, key=lambda each: -each.end)):
        smooth = pl.Series(each.rewards).rolling_mean(3, min_samples=1, center=True)
        colour = f"C{number}"
        axis.plot(range(len(smooth)), smooth, color=colour, lw=1.5, label=f"{each.algorithm}  {each.end:.3f}")
        axis.plot([0, STEPS], [each.start, each.end], "o", color=colour, ms=5)
    axis.set_xlabel("step")
    axis.set_ylabel("reward")
    axis.set_xticks(range(0, STEPS + 1, 5))
    axis.grid(axis="y", color="#dddddd", lw=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, title="held-out reward at the end", loc="lower right", ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folder that keeps the runs; a temporary one by default")
    parser.add_argument("--picture", type=Path, help="where to draw the curves (.png or .svg)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("algorithms", nargs="*", default=COMPARED)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
        root = words.root or Path(folder)
        learned = [measure(each, root, words.seed) for each in words.algorithms]
    print(f"{'algorithm':<14} {'start':>7} {'end':>7}")
    for each in learned:
        print(f"{each.algorithm:<14} {each.start:>7.3f} {each.end:>7.3f}")
    if words.picture:
        draw(learned, words.picture)
    lowest = {
        "lowest_end": min(each.end for each in learned),
        "lowest_gain": min(each.end - each.start for each in learned),
    }
    settings = {"steps": STEPS, "seed": words.seed, "algorithms": [asdict(each) for each in learned]}
    print(json.dumps({"benchmark": "algorithms"} | lowest | settings))


if __name__ == "__main__":
    main()
