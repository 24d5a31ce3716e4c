"""What a step costs as its work grows: laws whose constants come from benchmarks/results.json.

Each law is a line through two or three measured sizes, but for what a trajectory costs the flow: that is a step of 512 without
task runs, less what its rows cost, divided by 512, so that what a step costs once is in it. What a law says for more than was measured is the order of growth;
a network's, a disk's or a GPU's bandwidth is another machine's, and none is in here but where it is named. Prints the two
tables of docs/lab/performance.md, which `python -m benchmarks.run table` writes there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.suite.figures import find
from benchmarks.suite.results import Results
from benchmarks.suite.table import line, show

CALL_S = 0.02
"""Seconds of one control call over a network, as in `submission`."""
BYTES_A_TOKEN = 16
"""Of an ordinary row: id, log-probability, mask, and 8 bytes of text, as in `persist`."""
LINK_BYTES_PER_S = 1.25e9
"""A machine's link of 10 Gbit/s, which is assumed and not measured."""
PARAMETERS = {"5M": 5.05e6, "58M": 55.4e6}
"""Of the models of `train_step`."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step has to do; P groups of G rows of T tokens.

    Attributes:
        tokens: of a row, its prompt included.
        parameters: of the model, each sent as 2 bytes.
    """

    groups: int = 64
    group_size: int = 8
    tokens: int = 512
    servers: int = 4
    ranks: int = 8
    parameters: float = 0.5e9

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def weight_bytes(self) -> float:
        return 2.0 * self.parameters


BASE = Work()
GROWN = {
    "10 x groups": replace(BASE, groups=640),
    "10 x tokens": replace(BASE, tokens=5120),
    "10 x servers": replace(BASE, servers=40),
}
LARGE = Work(groups=512, group_size=16, tokens=4096, servers=64, ranks=512, parameters=32e9)


@dataclass(frozen=True, slots=True)
class Part:
    """A share of a step's cost.

    Attributes:
        needs: constants that it is made from, by name.
        law: how it grows, in words.
        cost: seconds of a work, given the constants.
    """

    name: str
    law: str
    needs: tuple[str, ...]
    cost: Callable[[Work, Mapping[str, float]], float]


def default_flow_s(work: Work, given: Mapping[str, float]) -> float:
    """Flow CPU of a step by default: task runs, trajectories, rows."""
    return (
        2 * work.groups * given["flow_s_a_task"]
        + work.rows * given["flow_s_a_trajectory"]
        + rows_s(work, given)
    )


def rows_s(work: Work, given: Mapping[str, float]) -> float:
    """Flow CPU of a step's rows, made and stored."""
    return work.rows * (given["store_s_a_row"] + given["store_s_a_byte"] * BYTES_A_TOKEN * work.tokens)


PARTS = (
    Part(
        "flow CPU, all of it by default",
        "2 P task runs + P G trajectories and rows",
        ("flow_s_a_task", "flow_s_a_trajectory", "store_s_a_row", "store_s_a_byte"),
        default_flow_s,
    ),
    Part(
        "of it requests, episodes, admission, groups",
        "P G",
        ("flow_s_a_trajectory",),
        lambda work, given: work.rows * given["flow_s_a_trajectory"],
    ),
    Part(
        "of it rows made and stored",
        "a P G + b P G T",
        ("store_s_a_row", "store_s_a_byte"),
        rows_s,
    ),
    Part(
        "of it task runs, by default: of a group's rollouts and of its scores",
        "2 P task runs",
        ("flow_s_a_task",),
        lambda work, given: 2 * work.groups * given["flow_s_a_task"],
    ),
    Part(
        "flow CPU of task runs, `observe.task_runs: groups`",
        "P task runs",
        ("flow_s_a_task",),
        lambda work, given: work.groups * given["flow_s_a_task"],
    ),
    Part(
        "flow CPU of task runs, `rollout.trajectories_per_task: 1`",
        "2 P G task runs",
        ("flow_s_a_task",),
        lambda work, given: 2 * work.rows * given["flow_s_a_task"],
    ),
    Part(
        "Prefect server CPU, by default",
        "2 P task runs",
        ("server_s_a_task",),
        lambda work, given: 2 * work.groups * given["server_s_a_task"],
    ),
    Part(
        "Prefect server CPU, `rollout.trajectories_per_task: 1`",
        "2 P G task runs",
        ("server_s_a_task",),
        lambda work, given: 2 * work.rows * given["server_s_a_task"],
    ),
    Part(
        "Prefect server CPU, `observe.task_runs: groups`",
        "P task runs",
        ("server_s_a_task",),
        lambda work, given: work.groups * given["server_s_a_task"],
    ),
    Part(
        "calls to all servers, until the last start",
        "a + b S, in calls of 20 ms",
        ("calls_at_once", "calls_a_server"),
        lambda work, given: CALL_S * (given["calls_at_once"] + given["calls_a_server"] * work.servers),
    ),
    Part(
        "plan of the micro-batches",
        "P G",
        ("pack_s_a_row",),
        lambda work, given: work.rows * given["pack_s_a_row"],
    ),
    Part(
        "training, CPU of each rank",
        "P G T (a + b parameters) / W",
        ("train_s_a_token", "train_s_a_token_and_parameter"),
        lambda work, given: (
            work.rows
            * work.tokens
            * (given["train_s_a_token"] + given["train_s_a_token_and_parameter"] * work.parameters)
            / work.ranks
        ),
    ),
    Part(
        "sending weights over TCP, CPU of each rank",
        "bytes S / W",
        ("send_s_a_byte",),
        lambda work, given: work.weight_bytes * work.servers * given["send_s_a_byte"] / work.ranks,
    ),
    Part(
        "the same, links of 10 Gbit/s, one for each rank and server",
        "bytes max(1, S / W) / link x growth with S",
        ("send_growth_a_server",),
        lambda work, given: (
            work.weight_bytes
            / LINK_BYTES_PER_S
            * max(1.0, work.servers / work.ranks)
            * (1.0 + given["send_growth_a_server"] * (work.servers - 1))
        ),
    ),
)


def slope_and_start(points: Sequence[Point]) -> tuple[float, float]:
    """The line through the points with the least squares, which cannot begin below 0: growth, and value at 0."""
    sizes, costs = (np.array(each, float) for each in zip(*points, strict=True))
    slope, start = np.polyfit(sizes, costs, 1)
    return float(slope), max(float(start), 0.0)


def constants(results: Results) -> dict[str, float]:
    """All constants whose benchmarks have run; seconds of CPU but for calls, which are counted."""
    found: dict[str, float] = {}
    for side in ("flow", "server"):
        if points := series(results, "fanout", f"{side}_cpu_s/{{}}", (64, 256, 1024)):
            found[f"{side}_s_a_task"] = slope_and_start([(2 * pairs, cost) for pairs, cost in points])[0]
    found |= fit_storing(results)
    without_task_runs = newest(results, "step_overhead", "flow_cpu_events_s")
    if without_task_runs and "store_s_a_row" in found:
        cost = without_task_runs["flow_cpu_events_s"] / without_task_runs["trajectories"]
        found["flow_s_a_trajectory"] = cost - found["store_s_a_row"]
    if points := series(results, "submission", "calls_{}", (1, 16, 64)):
        found["calls_a_server"], found["calls_at_once"] = slope_and_start(points)
    if packed := series(results, "packing", "cases/{} rows, 1 ranks/seconds", (512, 8192)):
        found["pack_s_a_row"] = slope_and_start(packed)[0]
    found |= fit_training(results)
    if points := series(results, "servers", "cpu_s_per_gb_and_receiver/{}", (1, 2, 4)):
        found["send_s_a_byte"] = float(np.mean([cost for _, cost in points])) / 2 / 1e9
    if points := series(results, "servers", "capped_seconds/{}", (1, 2, 4)):
        slope, _ = slope_and_start(points)
        found["send_growth_a_server"] = max(slope, 0.0) / points[0][1]
    return found


def fit_storing(results: Results) -> dict[str, float]:
    """CPU of a row and of a byte: rows of 100 kB, made and written, and rows of 9.5 MB, from the answer to the shard."""
    small, large = newest(results, "persist", "bytes"), newest(results, "handoff", "bytes")
    if not small or not large:
        return {}
    of_small = (small["rows_cpu_ms"] + small["cpu_ms"]) / 1000 / small["rows"]
    of_large = large["cpu_s"] / large["rows"]
    sizes = [(each["bytes"] / each["rows"], cost) for each, cost in ((small, of_small), (large, of_large))]
    slope, start = slope_and_start(sizes)
    return {"store_s_a_byte": slope, "store_s_a_row": start}


def fit_training(results: Results) -> dict[str, float]:
    """CPU of a token, and of a token and parameter: of two models, on one thread."""
    found = newest(results, "train_step", "sizes/58M/varlen/tokens_per_cpu_s")
    if not found:
        return {}
    points = [
        (parameters, 1.0 / found["sizes"][size]["varlen"]["tokens_per_cpu_s"])
        for size, parameters in PARAMETERS.items()
    ]
    slope, start = slope_and_start(points)
    return {"train_s_a_token_and_parameter": slope, "train_s_a_token": start}


def newest(results: Results, script: str, key: str) -> Mapping[str, Any] | None:
    """What the newest result of a script that has a key has printed."""
    having = [each for each in results if each.script == script and find(each.values, key) is not None]
    return max(having, key=lambda each: each.date).values if having else None


def series(results: Results, script: str, key: str, sizes: Sequence[int]) -> list[Point]:
    """Size and cost of each size that the newest result has; nothing for less than two."""
    values = newest(results, script, key.format(sizes[-1])) or newest(results, script, key.format(sizes[-2]))
    found = [(float(size), find(values or {}, key.format(size))) for size in sizes]
    points = [(size, cost) for size, cost in found if cost is not None]
    return points if len(points) > 1 else []


def text(results: Results) -> str:
    """The constants, and the table of the parts for the base, ten times each work, and the large case."""
    given = constants(results)
    works = {"base": BASE} | GROWN | {"large": LARGE}
    lines = [line(("seconds", "law", *works)), "|" + "---|" * (2 + len(works))]
    for part in PARTS:
        known = all(name in given for name in part.needs)
        costs = [show(part.cost(work, given)) if known else "not run" for work in works.values()]
        lines.append(line((part.name, part.law, *costs)))
    constants_table = [line(("constant", "value")), "|---|---|"]
    constants_table += [line((f"`{name}`", f"{constant:.2e}")) for name, constant in sorted(given.items())]
    work_list = [f"- {name}: {describe(work)}" for name, work in (("base", BASE), ("large", LARGE))]
    return "\n".join([*work_list, "", *lines, "", *constants_table]) + "\n"


def describe(work: Work) -> str:
    """A work in a sentence."""
    return (
        f"P = {work.groups} groups of G = {work.group_size}, T = {work.tokens} tokens a row, S = {work.servers} servers, "
        f"W = {work.ranks} ranks, {work.parameters / 1e9:g} billion parameters in 2 bytes each."
    )


def main() -> None:
    results = Results()
    print(text(results))
    print(json.dumps({"benchmark": "model"} | constants(results)))


if __name__ == "__main__":
    main()
