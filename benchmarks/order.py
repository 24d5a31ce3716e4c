"""How close to the shortest time does a step come whose groups begin with the longest, at 8 and at 32 slots?

32 problems, groups of 8. The length of a trajectory is lognormal with sigma 1, half of whose variance is the problem's: so an earlier
visit says something about it, and not all. Each run has two steps with the same problems. The first, which takes no time, is the
history; the second is measured. Scoring takes no time. The bound is the time with all slots busy, or the longest trajectory.
How close an order comes varies much with the drawn lengths, so a ratio is that of the schedule without overhead, in the mean of 200
seeds, times the overhead that was measured: seconds of our steps over those of the schedule with the same lengths.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from itertools import product
from pathlib import Path

from benchmarks.schedules.visits import scheduled_ratio
from tests.stubs.prefect_server import prefect_server

SLOTS = (8, 32)
SCHEDULED_SEEDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1")
    seeds = range(parser.parse_args().seeds)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
        from benchmarks.schedules.two_steps import order  # Prefect reads its settings when it is imported

        for n_slots, longest_first in product(SLOTS, (True, False)):
            overhead = statistics.mean(
                asyncio.run(order(Path(folder), seed, n_slots, longest_first)) for seed in seeds
            )
            scheduled = statistics.mean(
                scheduled_ratio(seed, n_slots, longest_first) for seed in range(SCHEDULED_SEEDS)
            )
            name = f"ratio_{n_slots}" + ("" if longest_first else "_first_come")
            figures |= {name: round(scheduled * overhead, 4)}
            print(f"{name:24} {figures[name]:.3f} = {scheduled:.3f} x overhead {overhead:.3f}")
    print(json.dumps({"benchmark": "order", "seeds": len(seeds)} | figures))


if __name__ == "__main__":
    main()
