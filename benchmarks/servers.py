"""What do more servers cost? 0.99 GB of bf16 from one rank to 1, 2 and 4 receivers at once, by TCP.

CPU seconds for each GB and receiver, of the trainer's rank and of a receiver, over loopback. Then seconds with every
receiver in a separate network namespace, each behind a link of 1 Gbit/s (tc's token bucket, which needs root):
`ratio_4_to_1` is four receivers' seconds to one's. The least of the passes.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks.weights import model
from benchmarks.weights.site import LOOPBACK, Spot, run_site

COUNTS, PASSES = (1, 2, 4), 3
TRAINER = "10.213.0.1"
RATE = ("rate", "1gbit", "burst", "1mb", "latency", "50ms")
TARGET = 1.15
GB = sum(each.size_bytes for each in model.tensors()) / 1e9


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def cap_spots(n_spots: int) -> Iterator[Sequence[Spot]]:
    """Create namespaces, each with a separate link to the trainer's address."""
    mark = f"rm{os.getpid() % 10**6}x{n_spots}"
    with ExitStack() as stack:
        ip("addr", "add", f"{TRAINER}/32", "dev", "lo")
        stack.callback(ip, "addr", "del", f"{TRAINER}/32", "dev", "lo")
        spots = []
        for number in range(1, n_spots + 1):
            space, outer, inner = f"{mark}n{number}", f"{mark}o{number}", f"{mark}i{number}"
            here, there = f"10.213.{number}.1", f"10.213.{number}.2"
            ip("netns", "add", space)
            stack.callback(ip, "netns", "del", space)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space)
            ip("addr", "add", f"{here}/24", "dev", outer)
            ip("link", "set", outer, "up")
            subprocess.run(["tc", "qdisc", "add", "dev", outer, "root", "tbf", *RATE], check=True)
            for words in (("addr", "add", f"{there}/24", "dev", inner), ("link", "set", inner, "up")):
                ip("-n", space, *words)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "route", "add", "default", "via", here)
            spots.append(Spot(there, ("ip", "netns", "exec", space)))
        yield spots


def measure(host: str, spots: Sequence[Spot], n_passes: int) -> dict[str, float]:
    """The least seconds of a sync, and CPU seconds for each GB and receiver, of all passes but the first."""
    with run_site(1, spots, host=host) as site:
        site.sync("tcp")
        before = [each.call("cpu_s") for each in (site.trainer, *site.receivers)]
        seconds = min(site.sync("tcp") for _ in range(n_passes))
        spent = [
            each.call("cpu_s") - start
            for each, start in zip((site.trainer, *site.receivers), before, strict=True)
        ]
    each = n_passes * GB * len(spots)
    return {"seconds": seconds, "sender_cpu_s": spent[0] / each, "receiver_cpu_s": sum(spent[1:]) / each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=PASSES, help="of each case")
    n_passes = parser.parse_args().passes
    free = {n: measure(LOOPBACK, [Spot(LOOPBACK)] * n, n_passes) for n in COUNTS}
    capped = {}
    for n in COUNTS:
        with cap_spots(n) as spots:
            capped[n] = measure(TRAINER, spots, n_passes)
    print(
        f"{'receivers':>10}{'seconds':>10}{'sender CPU s/GB':>18}{'receiver CPU s/GB':>20}{'at 1 Gbit/s, s':>18}"
    )
    for n in COUNTS:
        row = free[n]
        print(
            f"{n:10}{row['seconds']:10.3f}{row['sender_cpu_s']:18.3f}{row['receiver_cpu_s']:20.3f}"
            f"{capped[n]['seconds']:18.3f}"
        )
    ratio = capped[4]["seconds"] / capped[1]["seconds"]
    print(f"ratio_4_to_1: {ratio:.3f}, target {TARGET:g}: {'reached' if ratio <= TARGET else 'MISSED'}")
    figures = {
        "ratio_4_to_1": ratio,
        "cpu_s_per_gb_and_receiver": {
            n: row["sender_cpu_s"] + row["receiver_cpu_s"] for n, row in free.items()
        },
        "seconds": {n: row["seconds"] for n, row in free.items()},
        "capped_seconds": {n: row["seconds"] for n, row in capped.items()},
    }
    print(json.dumps({"benchmark": "servers", "passes": n_passes} | figures))


if __name__ == "__main__":
    main()
