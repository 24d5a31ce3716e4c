"""How much of a padded batch is padding, and how long does its plan take? 8,192 rows, 4,096 tokens a micro-batch.

Rows have a prompt of 64 tokens and a lognormal completion (sigma 0.8, mean 200, at most 512). `padding_share` is that
of the padded layout, padding to all tokens that go through the model; also the share of tokens that the varlen
layout does not compute, since the 8 rows of a group share their prompt. `idle_share` is what ranks wait for the slowest of
them in each micro-batch, to all that they could have computed. Seconds are CPU seconds, the least of the repeats.
"""

import argparse
import json
import time
from collections.abc import Callable

from benchmarks.trainer.lengths import N_PROMPT_TOKENS, completion_lengths
from rollmill.tasks.train.packing.packer import OVERHEAD_TOKENS
from rollmill.tasks.train.packing.packing_plan import TokenBudget, pack_padded, pack_varlen
from rollmill.tasks.train.packing.prefixes import PrefixGroup

CASES = ((8192, 1), (8192, 4), (512, 1), (512, 4), (32, 1), (32, 4))
GROUP_SIZE, REPEATS, SEEDS = 8, 5, 4
BUDGET_TOKENS = 4096
TARGETS = {"padding_share": 0.02, "seconds": 0.2}
Plan = list[list[list[int]]]
Figures = dict[str, float]


def measure_padded(lengths: list[int], n_ranks: int) -> Figures:
    """Padding, seconds and micro-batches of the padded layout."""
    budget = TokenBudget(BUDGET_TOKENS, OVERHEAD_TOKENS)
    plan, seconds = time_plan(lambda: pack_padded(lengths, n_ranks, budget))
    costs = [[len(cut) * max((lengths[row] for row in cut), default=0) for cut in rank] for rank in plan]
    return {
        "padding_share": 1.0 - sum(lengths) / sum(map(sum, costs)),
        "idle_share": idle_share(costs),
        "seconds": seconds,
        "micro_batches": len(plan[0]),
    }


def in_line(lengths: list[int], n_ranks: int) -> Figures:
    """The same of the varlen layout, with groups that share their prompt."""
    rows = [range(first, first + GROUP_SIZE) for first in range(0, len(lengths), GROUP_SIZE)]
    ordered = [sorted(group, key=lambda row: -lengths[row]) for group in rows]
    units = [PrefixGroup(group, [lengths[row] for row in group], N_PROMPT_TOKENS) for group in ordered]
    plan, seconds = time_plan(lambda: pack_varlen(units, n_ranks, BUDGET_TOKENS))
    costs = [[line_tokens(lengths, cut) for cut in rank] for rank in plan]
    return {
        "shared_share": 1.0 - sum(map(sum, costs)) / sum(lengths),
        "line_idle_share": idle_share(costs),
        "line_seconds": seconds,
    }


def line_tokens(lengths: list[int], rows: list[int]) -> int:
    """Return the tokens of a packed sequence that has each group's prompt once."""
    n_groups = len({row // GROUP_SIZE for row in rows})
    return sum(lengths[row] for row in rows) - N_PROMPT_TOKENS * (len(rows) - n_groups)


def idle_share(costs: list[list[int]]) -> float:
    """[W][micro-batches] tokens: those by which ranks have less than the one with most, to all."""
    slowest: int = sum(max(at_once) for at_once in zip(*costs, strict=True))
    return 1.0 - sum(map(sum, costs)) / (len(costs) * slowest)


def time_plan(work: Callable[[], Plan]) -> tuple[Plan, float]:
    """A plan, and the least CPU seconds of making it."""
    spent = []
    for _ in range(REPEATS):
        started = time.process_time()
        plan = work()
        spent.append(time.process_time() - started)
    return plan, min(spent)


def mean(n_rows: int, n_ranks: int) -> Figures:
    """Means over seeds."""
    found = []
    for seed in range(SEEDS):
        lengths = [N_PROMPT_TOKENS + each for each in completion_lengths(n_rows, seed)]
        found.append(measure_padded(lengths, n_ranks) | in_line(lengths, n_ranks))
    return {name: sum(each[name] for each in found) / SEEDS for name in found[0]}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    cases = {f"{n_rows} rows, {n_ranks} ranks": mean(n_rows, n_ranks) for n_rows, n_ranks in CASES}
    figures = next(iter(cases.values()))
    print(f"{'':20}" + "".join(f"{name:>18}" for name in figures))
    for case, found in cases.items():
        print(f"{case:20}" + "".join(f"{value:18.4f}" for value in found.values()))
    for name, target in TARGETS.items():
        reached = "reached" if figures[name] <= target else "MISSED"
        print(f"{name}: {figures[name]:.4f}, target {target:g}: {reached}")
    print(json.dumps({"benchmark": "packing"} | figures | {"cases": cases}))


if __name__ == "__main__":
    main()
