"""How long do the weights of a 0.5B model take to one receiver on loopback? 290 tensors, 0.99 GB of bf16; 2 ms a control call.

Ours is the product's sender, links, receiver and messages: asked for what it offers, ordered to send; the receiver asked where
it is, and ordered to take. For comparison: a call, a gloo send and a wait for each parameter; the same with all dispatched and
awaited at the end; one large tensor over gloo with as many streams; a memcpy. Each for whole weights from one rank and from
two ZeRO-3 ranks, of which the others' ways gather each parameter first. Nothing is loaded anywhere. The least seconds of the
passes, which take turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.weights import model
from benchmarks.weights.site import Site, run_site
from rollmill.tasks.sync.transfer_plan import STREAMS

PASSES, DELAY_S = 5, 0.002
TARGETS = {"speedup": 4.0, "speedup_zero3": 6.0, "share_of_loopback": 0.8}
MOST_CALLS = 5
N_BYTES = sum(each.size_bytes for each in model.tensors())


def others(site: Site, way: str) -> float:
    """Seconds of a way that the trainer drives."""
    where = {"address": site.spots[0].address, "port": site.ports[0]}
    started = time.perf_counter()
    site.trainer.call(way, where)
    return time.perf_counter() - started


def large(site: Site) -> float:
    """Seconds of one large tensor."""
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(site.receivers[0].call, "large", {"bytes": N_BYTES})
        site.trainer.call("large", {"bytes": N_BYTES})
        taken.result()
    return time.perf_counter() - started


def join(site: Site, n_ranks: int) -> None:
    """Open what the others' ways and the large tensor travel on."""
    with ThreadPoolExecutor(1) as thread:
        port = site.trainer.call("offer")["port"]
        joined = thread.submit(
            site.receivers[0].call, "join", {"host": site.host, "port": port, "pairs": n_ranks * STREAMS}
        )
        site.trainer.call("join")
        joined.result()


def memcpy_s() -> float:
    """Seconds of copying as many bytes in memory that has been touched."""
    source, target = torch.ones(N_BYTES, dtype=torch.uint8), torch.ones(N_BYTES, dtype=torch.uint8)
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


def measure(n_ranks: int, n_passes: int) -> tuple[dict[str, float], int]:
    """The least seconds of each way from so many ranks, and how many control calls ours made in a sync."""
    with run_site(n_ranks, delay_s=DELAY_S) as site:
        join(site, n_ranks)
        ways = {
            "ours": lambda: site.sync("tcp"),
            "large": lambda: large(site),
            "dispatched": lambda: others(site, "dispatched"),
            "per_parameter": lambda: others(site, "one_by_one"),
        }
        least = fastest(ways, n_passes)
        before = site.n_calls
        site.sync("tcp")
        n_calls = site.n_calls - before
    with run_site(n_ranks, delay_s=DELAY_S) as site:
        return least | fastest({"shm": lambda: site.sync("shm")}, n_passes), n_calls


def fastest(ways: Mapping[str, Callable[[], float]], n_passes: int) -> dict[str, float]:
    """The least seconds of each way; the first pass opens links and touches memory, and does not count."""
    passes = [{way: run() for way, run in ways.items()} for _ in range(1 + n_passes)]
    return {way: min(each[way] for each in passes[1:]) for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="of each way")
    n_passes = parser.parse_args().passes
    whole, n_calls = measure(1, n_passes)
    shards, n_calls_of_two = measure(2, n_passes)
    memcpy = min(memcpy_s() for _ in range(n_passes))
    print(f"{'':16}{'1 rank, s':>12}{'GB/s':>8}{'2 ZeRO-3 ranks, s':>20}{'GB/s':>8}")
    for way in whole:
        rates = (N_BYTES / each[way] / 1e9 for each in (whole, shards))
        first, second = rates
        print(f"{way:16}{whole[way]:12.3f}{first:8.2f}{shards[way]:20.3f}{second:8.2f}")
    print(f"{'memcpy':16}{memcpy:12.3f}{N_BYTES / memcpy / 1e9:8.2f}")
    figures = {
        "seconds_ours": whole["ours"],
        "seconds_per_parameter": whole["per_parameter"],
        "seconds_dispatched": whole["dispatched"],
        "seconds_shm": whole["shm"],
        "seconds_large": whole["large"],
        "seconds_ours_zero3": shards["ours"],
        "seconds_per_parameter_zero3": shards["per_parameter"],
        "seconds_dispatched_zero3": shards["dispatched"],
        "seconds_shm_zero3": shards["shm"],
        "seconds_large_zero3": shards["large"],
        "seconds_memcpy": memcpy,
        "speedup": whole["per_parameter"] / whole["ours"],
        "speedup_zero3": shards["per_parameter"] / shards["ours"],
        "share_of_loopback": whole["large"] / whole["ours"],
        "share_of_loopback_zero3": shards["large"] / shards["ours"],
        "control_calls": max(n_calls, n_calls_of_two),
    }
    for name, target in TARGETS.items():
        print(
            f"{name}: {figures[name]:.3f}, target {target:g}: {'reached' if figures[name] >= target else 'MISSED'}"
        )
    is_few = figures["control_calls"] <= MOST_CALLS
    print(
        f"control_calls: {figures['control_calls']}, target {MOST_CALLS}: {'reached' if is_few else 'MISSED'}"
    )
    print(json.dumps({"benchmark": "sync", "passes": n_passes} | figures))


if __name__ == "__main__":
    main()
