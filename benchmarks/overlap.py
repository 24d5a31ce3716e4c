"""How much of the time does scoring wait for rollouts? 32 groups of 8, 8 rollout and 4 scoring slots, five seeds.

Every system has the same drawn work and nothing else to do; see `benchmarks/schedules`. Compared are Rollmill with a
task for each trajectory and with a task for each group, the same two schedules without any overhead, and two
versions of openpipe-art: one scores a group once it is complete, the other when all groups are.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.schedules import first_come, peer_process
from benchmarks.schedules.latencies import ROLLOUT_SLOTS, SCORING_SLOTS, Latencies, draw
from benchmarks.schedules.timeline import Timeline
from tests.stubs.prefect_server import prefect_server

MEDIAN_S = 0.5
"""m: the work is then half a minute, compared with which the fan-out's own seconds and a machine's noise are small."""
WARM_UP_MEDIAN_S = 0.001
"""m of the run before the first that counts: much is imported in it."""
PEERS = {
    peer_process.FUSED: ("ART 0.5.18, scores complete groups", "ratio_art_fused"),
    peer_process.TWO_GATHERS: ("ART 0.4.11, scores when all are there", "ratio_art_two_gathers"),
}
"""Their lines in the table, and their figures."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One system over one seed, with the bound and the schedule without overhead of its way of scoring."""

    timeline: Timeline
    bound_s: float
    ideal: Timeline

    @property
    def ratio(self) -> float:
        """To the lower bound."""
        return self.timeline.makespan_s / self.bound_s

    @property
    def overhead(self) -> float:
        """To the schedule without overhead."""
        return self.timeline.makespan_s / self.ideal.makespan_s


def by_trajectory(latencies: Latencies, timeline: Timeline | None = None) -> Measured:
    """A system that scores each trajectory by itself; without a timeline the ideal one."""
    ideal = first_come.by_trajectory(latencies)
    return Measured(timeline or ideal, first_come.trajectory_bound_s(latencies), ideal)


def by_group(latencies: Latencies, timeline: Timeline | None = None) -> Measured:
    """A system that scores each group as a whole; without a timeline the ideal one."""
    ideal = first_come.by_group(latencies)
    return Measured(timeline or ideal, first_come.group_bound_s(latencies), ideal)


def measure_ours(folder: Path, seeds: Sequence[int], median_s: float) -> dict[str, list[Measured]]:
    """Both modes over every seed."""
    from benchmarks.schedules.ours import overlap  # Prefect reads its settings when it is imported

    def timeline(mode: Literal["trajectory", "group"], seed: int) -> Timeline:
        return asyncio.run(overlap(folder, mode, seed, median_s))

    asyncio.run(overlap(folder / "warm-up", "group", 0, WARM_UP_MEDIAN_S))
    work = {seed: draw(seed, median_s) for seed in seeds}
    return {
        "trajectory": [by_trajectory(work[seed], timeline("trajectory", seed)) for seed in seeds],
        "group": [by_group(work[seed], timeline("group", seed)) for seed in seeds],
    }


def mean(measured: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    return statistics.mean(map(of, measured))


def row(name: str, measured: Sequence[Measured], median_s: float) -> str:
    """A line of the table: means over seeds."""
    figures = [
        mean(measured, lambda each: each.ratio),
        mean(measured, lambda each: each.overhead),
        mean(measured, lambda each: each.timeline.rollout_share(ROLLOUT_SLOTS)),
        mean(measured, lambda each: each.timeline.scoring_share(SCORING_SLOTS)),
        mean(measured, lambda each: each.timeline.first_score_s) / median_s,
        mean(measured, lambda each: each.timeline.makespan_s),
    ]
    formats = ("8.3f", "10.3f", "9.0%", "9.0%", "12.1f", "11.2f")
    cells = " ".join(format(value, form) for value, form in zip(figures, formats, strict=True))
    return f"{name:38} {len(measured):5} {cells}"


def slots(way: str, measured: Sequence[Measured], median_s: float) -> dict[str, float]:
    """Shares of the slots' time that they were busy, and the first score in units of m; means over seeds."""
    return {
        f"rollouts_busy_{way}": mean(measured, lambda each: each.timeline.rollout_share(ROLLOUT_SLOTS)),
        f"scores_busy_{way}": mean(measured, lambda each: each.timeline.scoring_share(SCORING_SLOTS)),
        f"first_score_{way}": mean(measured, lambda each: each.timeline.first_score_s) / median_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N-1")
    parser.add_argument("--median-s", type=float, default=MEDIAN_S, help="seconds of the median rollout (m)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone: nothing is installed")
    arguments = parser.parse_args()
    seeds, median_s = range(arguments.seeds), arguments.median_s

    work = [draw(seed, median_s) for seed in seeds]
    peers = {
        peer: [by_group(each, peer_process.measure(peer, each)) for each in work]
        for peer in ([] if arguments.no_peers else PEERS)
    }
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
        ours = measure_ours(Path(folder), seeds, median_s)

    print(f"m = {median_s:g} s; means over seeds; shares of the slots' time that they were busy")
    print(f"{'':38} seeds to bound to no cost rollouts   scores  first score makespan, s")
    print(row("ours, by trajectory", ours["trajectory"], median_s))
    print(row("no overhead, by trajectory", [by_trajectory(each) for each in work], median_s))
    print(row("ours, by group", ours["group"], median_s))
    print(row("no overhead, by group", [by_group(each) for each in work], median_s))
    for peer, found in peers.items():
        print(row(PEERS[peer][0], found, median_s))
    figures = {
        "ratio_trajectory": mean(ours["trajectory"], lambda each: each.ratio),
        "ratio_group": mean(ours["group"], lambda each: each.ratio),
        "overhead_trajectory": mean(ours["trajectory"], lambda each: each.overhead),
        "overhead_group": mean(ours["group"], lambda each: each.overhead),
        **slots("trajectory", ours["trajectory"], median_s),
        **slots("group", ours["group"], median_s),
    } | {PEERS[peer][1]: mean(found, lambda each: each.ratio) for peer, found in peers.items()}
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({"benchmark": "overlap", "seeds": len(seeds), "median_s": median_s} | rounded))


if __name__ == "__main__":
    main()
