"""Does the estimate of `rollmill ab` order what training then reaches? Presets and seeds, three scorers each, over the real services.

For each preset and seed a run samples the rollouts of 10 steps; an arm is trained on them for 10 steps by each of three scorers. The
estimate is the gain of an arm under a scorer that `rollmill ab` prints before anything is trained; the truth is the difference of the
arm to the start model in sampled held-out reward. Parts that are finished below runs/ are read, not done again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import polars as pl

PRESETS = {"quickstart": "addition", "calculator": "calculator"}
"""The presets, and the scorer of each."""
OTHERS = ("benchmarks.studies.ab_rewards:brief", "benchmarks.studies.ab_rewards:wordy")
STEPS, N_PROMPTS = 10, 256
FAR = 0.05
"""About half of the width of a difference's interval with so many prompts."""
ROLLMILL = Path(sys.executable).parent / "rollmill"


@dataclass(frozen=True, slots=True)
class Cell:
    """An arm under a scorer: the estimated gain, with the effective share of the trajectories, and what training reached."""

    preset: str
    seed: int
    arm: str
    scorer: str
    estimate: float
    effective_share: float
    truth: float


def measure(preset: str, seed: int) -> list[Cell]:
    """Run the preset and its A/B comparison, unless that is done, and read the cells."""
    name = f"ab-estimate-{preset}-{seed}"
    settings = (
        f"steps={STEPS}",
        f"seed={seed}",
        f"evaluate.n_prompts={N_PROMPTS}",
        f"evaluate.every={STEPS}",
    )
    if not _is_finished(name):
        given = [word for each in settings for word in ("--set", each)]
        subprocess.run(
            [str(ROLLMILL), "run", preset, "--name", name, *given], check=True, stdout=subprocess.DEVNULL
        )
    scorers = [word for each in (PRESETS[preset], *OTHERS) for word in ("--scorer", each)]
    words = [str(ROLLMILL), "ab", name, *scorers, "--json"]
    done = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
    truths = {
        (each["policy"], each["scorer"]): each["difference"]
        for each in done["differences"]
        if each["answers"] == "sampled" and each["against"] == "start model"
    }
    return [
        Cell(
            preset=preset,
            seed=seed,
            arm=each["arm"],
            scorer=each["scorer"],
            estimate=each["gain"],
            effective_share=each["effective"] / each["n"],
            truth=truths[each["arm"], each["scorer"]],
        )
        for each in done["estimates"]
    ]


def _is_finished(name: str) -> bool:
    manifest = Path("runs") / name / "run.json"
    return manifest.exists() and json.loads(manifest.read_text())["status"] == "finished"


def correlate(cells: Sequence[Cell]) -> float:
    """Return Spearman's rank correlation of estimates and truths."""
    frame = pl.DataFrame([{"estimate": each.estimate, "truth": each.truth} for each in cells])
    return float(frame.select(pl.corr("estimate", "truth", method="spearman")).item())


def count_ordered(cells: Iterable[Cell], least: float = 0.0) -> tuple[int, int]:
    """Count the pairs of arms of one run whose order under a scorer is estimated right, and all pairs; `least`: their distance in truth."""
    by_column: dict[tuple[str, int, str], list[Cell]] = {}
    for each in cells:
        by_column.setdefault((each.preset, each.seed, each.scorer), []).append(each)
    pairs = [pair for column in by_column.values() for pair in combinations(column, 2)]
    pairs = [(a, b) for a, b in pairs if abs(a.truth - b.truth) >= least]
    right = sum((a.estimate - b.estimate) * (a.truth - b.truth) > 0 for a, b in pairs)
    return right, len(pairs)


def main() -> None:
    """Measure all, print a line for each cell and the correlations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="print the cells as JSON")
    options = parser.parse_args()
    cells: list[Cell] = []
    for seed in options.seeds:
        for preset in options.presets:
            cells += measure(preset, seed)
    if options.json:
        print(json.dumps([asdict(each) for each in cells], indent=2))
        return
    for each in cells:
        print(
            f"{each.preset} seed {each.seed}: trained by {each.arm}, under {each.scorer}: estimated {each.estimate:+.3f} "
            f"(effective {each.effective_share:.2f}), reached {each.truth:+.3f}"
        )
    _print_summary("all", cells)
    for preset in options.presets:
        _print_summary(preset, [each for each in cells if each.preset == preset])
    _print_summary(
        "arms under a scorer that they were not trained by",
        [each for each in cells if each.arm != each.scorer],
    )


def _print_summary(what: str, cells: Sequence[Cell]) -> None:
    right, n = count_ordered(cells)
    far_right, n_far = count_ordered(cells, FAR)
    print(
        f"{what}: {len(cells)} cells, rank correlation {correlate(cells):.2f}, {right} of {n} pairs of arms in the right order, "
        f"{far_right} of {n_far} that reach rewards at least {FAR} apart"
    )


if __name__ == "__main__":
    main()
