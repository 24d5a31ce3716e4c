"""How close to the shortest time does a step come whose groups begin with the longest, at 8 and at 32 slots?

32 problems, groups of 8. The length of a trajectory is lognormal with sigma 1, half of whose variance is the problem's: so an earlier
visit says something about it, and not all. Each run has two steps with the same problems. The first, which takes no time, is the
history; the second is measured. Scoring takes no time. The bound is the time with all slots busy, or the longest trajectory.
How close an order comes varies much with the drawn lengths, so a ratio is that of the schedule without overhead, in the mean of 200
seeds, times the overhead that was measured: seconds of our steps over those of the schedule with the same lengths. Where scoring takes as long as sampling, the longest groups first would leave scorers idle at the beginning: see `overlap`.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from prefect import flow
from prefect.utilities.annotations import quote

from benchmarks.schedules.first_come import serve
from benchmarks.schedules.latencies import GROUP_SIZE, N_GROUPS
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn, Split
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from tests.stubs.prefect_server import prefect_server
from tests.stubs.toy_settings import validate_toy

SLOTS = (8, 32)
PROBLEM_SHARE = 0.5
"""Share of the variance of log lengths that is the problem's."""
MEDIAN_TOKENS = 20
MEDIAN_S = 0.5
SCHEDULED_SEEDS = 200
TIMEOUT_S = 3600.0

Seconds = Sequence[Sequence[float]]
"""[P][G] of each trajectory: P problems, groups of G."""


def draw(seed: int) -> list[Seconds]:
    """Draw the lengths of two visits of each problem, in units of the median."""
    drawn = random.Random(seed)
    problems = [drawn.gauss(0, math.sqrt(PROBLEM_SHARE)) for _ in range(N_GROUPS)]
    sigma = math.sqrt(1 - PROBLEM_SHARE)
    return [
        [[math.exp(drawn.gauss(log_median, sigma)) for _ in range(GROUP_SIZE)] for log_median in problems]
        for _ in range(2)
    ]


def bound(lengths: Seconds, n_slots: int) -> float:
    """Return the time that no schedule is shorter than."""
    every = [each for group in lengths for each in group]
    return max(sum(every) / n_slots, *every)


def schedule(lengths: Seconds, order: Sequence[int], n_slots: int) -> float:
    """Return the time that the problems need in an order, without any overhead."""
    durations = [each for problem in order for each in lengths[problem]]
    return max(each.end_s for each in serve([0.0] * len(durations), durations, n_slots))


def scheduled_ratio(seed: int, n_slots: int, longest_first: bool) -> float:
    """Return the time of the second visit over its bound, without any overhead."""
    history, lengths = draw(seed)
    numbers = range(N_GROUPS)
    order = sorted(numbers, key=lambda each: -sum(history[each])) if longest_first else numbers
    return schedule(lengths, order, n_slots) / bound(lengths, n_slots)


class Problems:
    """As many problems as groups; each is its number."""

    name = "problems"
    tools: tuple[Mapping[str, object], ...] = ()
    stop: tuple[str, ...] = ()

    def size(self, split: Split) -> int:
        """Return the number of problems; see Environment."""
        return N_GROUPS

    async def example(self, split: Split, index: int) -> Example:
        """Return a problem; see Environment."""
        return Example(str(index), {})

    def episode(self, example: Example, seed: int) -> SingleTurn:
        """Return an episode of one turn; see Environment."""
        return SingleTurn((Message("user", example.example_id),))


@dataclass(frozen=True, slots=True)
class Sleeping:
    """Answers with as many tokens as the drawn length says, in the measured step after as many seconds."""

    lengths: Sequence[Seconds]
    tokenizer: ChatTokenizer
    order: list[int]

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        """Return the answer; see Sampler."""
        step, problem = work.group // N_GROUPS, int(work.example.example_id)
        length = self.lengths[step][problem][work.sample]
        if step:
            if problem not in self.order:
                self.order.append(problem)
            await asyncio.sleep(MEDIAN_S * length)
        answer = self.tokenizer.encode_answer("1" * max(1, round(MEDIAN_TOKENS * length)))
        return SampledTokens(answer, np.zeros(len(answer), np.float32), ((0, 0),), "stop", "asleep")


async def score(candidate: object) -> float:
    """Return a reward at once."""
    return 1.0


@flow(flow_run_name="seed {seed}, {n_slots} slots, longest first: {longest_first}", persist_result=False)
async def order(folder: Path, seed: int, n_slots: int, longest_first: bool) -> float:
    """Collect two steps; return the seconds of the second one over those of its order without any overhead."""
    from rollmill.flows.run.live_run import open_run
    from rollmill.flows.step.step_collection import collect_step

    config = validate_toy(
        {
            "model": str(save_character_tokenizer(folder / "model")),
            "steps": 2,
            "rollout": {
                "groups_per_step": N_GROUPS,
                "group_size": GROUP_SIZE,
                "max_in_flight": n_slots,
                "longest_first": longest_first,
                "trajectory_timeout_s": TIMEOUT_S,
            },
            "score": {"scorer": f"{score.__module__}:{score.__name__}"},
            "store": {"root": str(folder / "runs")},
        }
    )
    lengths, begun = draw(seed), list[int]()
    async with open_run(f"{seed}-{n_slots}-{longest_first}", config, Path(config.model)) as run:
        (environment,) = run.environments
        sampler = Sleeping(lengths, environment.player.tokenizer, begun)
        player = replace(environment.player, environment=Problems(), sampler=sampler)
        planted = replace(run, environments=(replace(environment, environment=Problems(), player=player),))
        collected = []
        for step in range(2):
            run.recording.count_start()
            collected.append(await collect_step(quote(planted), step, wait_for=()))
        await run.recording.wait_until_recorded()
    return collected[1].seconds / (MEDIAN_S * schedule(lengths[1], begun, n_slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N-1")
    seeds = range(parser.parse_args().seeds)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
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
