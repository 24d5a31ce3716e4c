"""How much of a run's time is useful while its processes are killed? `rollmill run quickstart`, on an S3 store.

All parts are the product's: the flow, a trainer rank, a vLLM server, a worker of the environment, one of the scorer, a Prefect server,
and an S3 store (moto's server; its gateway is killed, its objects remain). In each N minutes one role, drawn without
replacement from a seeded deck of seven, is killed by SIGKILL at a random moment. Service managers start the flow's
command, the Prefect server and the gateway again a second later; all else is the product's matter.

Useful seconds: the steps that ended, times the seconds of such a step without kills, by step number modulo 10, since each tenth
evaluates and writes a checkpoint. These are measured twice, in an undisturbed run on the same services just before, and in
the killed run itself by its steps that no kill touched; the smaller share counts, so that a change of the machine's load
between the two runs does not flatter. All seconds: wall time under kills. Both begin with the end of step 9, so the first
start is in neither.

A role's cost is the wall time from the last step's end before its kill to the second step's end after it, less the
seconds of the steps in between without kills; a kill that another one follows sooner has none.

Lost trajectories: rows that were stored when something was killed, and are not in the finished run as they were (sampled
again, or gone), or twice: `lost_trajectory_seconds` is the sum of their server seconds. Trajectories that a kill of the flow cut while they were sampled
were never complete: `cut_trajectories` is their number, at most one step's, and `rollmill verify` checks the finished run.

N = 10 is modelled, and N = 1 too: 1 - C / 60 N with the mean cost C of a role in seconds. The peer is computed, not run: a system that restarts
the whole job from its last checkpoint, every ten steps as here, whenever flow, rank or server dies. The same kills cost it the
undisturbed start, the steps since the checkpoint and the open step; other roles cost it what they cost here, Prefect nothing.
"""

import argparse
import json
import math
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import psutil

from benchmarks.kills.accounting import (
    Kill,
    StepSeconds,
    calm_ratio,
    effective_share,
    kill_costs,
    mean_by_role,
    modelled_share,
    peer_costs,
)
from benchmarks.kills.managed_run import ManagedRun, watch_end
from benchmarks.kills.roles import MODULES, ROLES, Deck, find_processes
from benchmarks.kills.services import RESTART_DELAY_S, Services, serve_run
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.verify.run_verification import verify_run

ROOT = Path(__file__).parents[1]
WARM_STEP, PERIOD, REFERENCE_PERIODS = 9, 10, 3
GROUP_SIZE = 8
MINUTES, MODELLED_MINUTES = (3, 1), (1, 10)
TARGET, TARGET_MINUTES = 0.8, 3
POLL_S = 0.1
FIND_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 3000.0
MOMENTS = (0.25, 0.75)
"""Between which shares of its interval a kill comes, so that two are at least half an interval apart."""


class Killed(NamedTuple):
    """A run that was killed again and again, and what was lost.

    Attributes:
        lost_s: server seconds of stored trajectories that were sampled again, are gone or doubled.
        n_cut: trajectories of the open step without a row at the flow's kills.
        findings: of `rollmill verify`.
    """

    run: ManagedRun
    kills: list[Kill]
    lost_s: float
    n_cut: int
    findings: list[str]


def command(services: Services, name: str, steps: int) -> list[str]:
    """The words after `rollmill`: the quickstart on S3, with its environment in a separate process."""
    settings = {"steps": steps, "store.root": services.root, "rollout.env_workers": 1}
    return ["run", "quickstart", "--name", name, *(f"--set={key}={value}" for key, value in settings.items())]


def wait_for(run: ManagedRun, moment: Any, what: str, timeout_s: float) -> None:
    """Wait until `moment()` holds or the run is over.

    Raises:
        RunFailedError: the run was given up.
        TimeoutError: neither came in time.
    """
    deadline = time.monotonic() + timeout_s
    while not moment() and not run.is_over.is_set():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(POLL_S)
    run.check()


def kill(run: ManagedRun, services: Services, role: str, chance: random.Random) -> float:
    """Kill one process of a role once one lives; returns the moment."""
    if role in MODULES:
        wait_for(run, lambda: find_processes(run.pid, role), role, FIND_TIMEOUT_S)
        chance.choice(find_processes(run.pid, role)).kill()
    elif role == "Prefect server":
        services.kill_prefect()
    elif role == "S3":
        services.kill_s3()
    else:
        wait_for(run, lambda: run.pid, role, FIND_TIMEOUT_S)
        flow = psutil.Process(run.pid)
        # Without the flow itself, whose exit status its service manager reads.
        tree = flow.children(recursive=True)
        flow.kill()
        threading.Thread(target=watch_end, args=(run, tree), daemon=True).start()
    return time.monotonic()


def stored_rows(folder: RunFolder, first_step: int) -> pl.DataFrame:
    """The stored trajectories from a step on: step, id, begin, server seconds."""
    rows = scan(folder, "rollouts", ["step", "trajectory_id", "started_at", "generate_s"])
    return rows.filter(pl.col("step") >= first_step).collect()


def count_lost(final: pl.DataFrame, snapshots: Sequence[pl.DataFrame]) -> float:
    """Return the server seconds of stored trajectories that are missing, changed, or doubled in the end."""
    key = ["trajectory_id", "started_at"]
    acknowledged = pl.concat(snapshots).unique(key) if snapshots else final.clear()
    gone = acknowledged.join(final, on=key, how="anti")
    doubled = final.filter(pl.col("trajectory_id").is_duplicated())
    return float(pl.concat([gone, doubled])["generate_s"].to_numpy().sum())


def run_killed(services: Services, folder: Path, minutes: float, steps: int, chance: random.Random) -> Killed:
    """Run the quickstart, and kill a role in each interval from the end of step 9 until its end."""
    name = f"every-{minutes:g}-min"
    run = ManagedRun(command(services, name, steps), ROOT, folder / f"{name}.log", {})
    stored = RunFolder(f"{services.root}/{name}")
    deck, kills, snapshots, n_cut = Deck(chance), list[Kill](), list[pl.DataFrame](), 0
    try:
        wait_for(run, lambda: len(run.steps) > WARM_STEP, f"step {WARM_STEP}", RUN_TIMEOUT_S)
        began = time.monotonic()
        while not (run.is_over.is_set() or run.steps[-1].step == steps - 1):
            at_s = began + 60.0 * minutes * (len(kills) + chance.uniform(*MOMENTS))
            wait_for(run, lambda at_s=at_s: time.monotonic() >= at_s, "a kill", RUN_TIMEOUT_S)
            if run.is_over.is_set() or run.steps[-1].step == steps - 1:
                break
            role, step = deck.draw(), run.steps[-1].step
            kills.append(Kill(role, kill(run, services, role, chance)))
            print(f"{kills[-1].at_s - began:7.1f} s: killed {role} after step {step}", flush=True)
            if role != "S3":
                snapshots.append(stored_rows(stored, step))
            if role == "flow":
                n_cut += count_open(stored, snapshots[-1])
        # Its pages and its last rows are stored after its last step.
        wait_for(run, run.is_over.is_set, "the end", RUN_TIMEOUT_S)
    finally:
        run.stop()
    run.check()
    final = stored_rows(stored, 0)
    findings = [str(each) for each in verify_run(stored).findings]
    return Killed(run, kills, count_lost(final, snapshots), n_cut, findings)


def count_open(folder: RunFolder, rows: pl.DataFrame) -> int:
    """Return how many planned trajectories of the newest step have no row."""
    plans = scan(folder, "plans", ["step", "n_groups"]).collect()
    step = plans["step"].max()
    planned = int(plans.filter(pl.col("step") == step)["n_groups"].to_numpy().sum()) * GROUP_SIZE
    return planned - len(rows.filter(pl.col("step") == step))


def warm(run: ManagedRun) -> list[Any]:
    """The moments of a run's steps from step 9 on."""
    return [each for each in run.steps if each.step >= WARM_STEP]


def measure_reference(services: Services, folder: Path, n_periods: int) -> StepSeconds:
    """Run undisturbed; returns the seconds of its steps."""
    steps = WARM_STEP + 1 + n_periods * PERIOD
    run = ManagedRun(command(services, "undisturbed", steps), ROOT, folder / "undisturbed.log", {})
    try:
        wait_for(run, run.is_over.is_set, "the undisturbed run's end", RUN_TIMEOUT_S)
    finally:
        run.stop()
    return StepSeconds(warm(run), PERIOD)


def report(minutes: float, killed: Killed, useful: StepSeconds) -> dict[str, float]:
    """Print what each kill cost, and return the run's figures."""
    run, steps = killed.run, warm(killed.run)
    start_s = run.ready[0] - run.starts[0]
    # The load of a shared machine differs from that of the run before.
    ratio = calm_ratio(steps, killed.kills, useful)
    own = useful.times(ratio)
    costs = kill_costs(steps, killed.kills, own)
    by_role = mean_by_role(killed.kills, costs)
    by_own, by_undisturbed = effective_share(steps, own), effective_share(steps, useful)
    share = min(by_own, by_undisturbed)
    wall_s = steps[-1].at_s - steps[0].at_s
    peer = peer_costs(
        steps,
        killed.kills,
        own,
        checkpoint_every=PERIOD,
        restart_s=RESTART_DELAY_S + start_s,
        others={role: max(0.0, by_role.get(role, 0.0)) for role in ("environment", "scorer", "S3")},
    )
    useful_s = own.total(steps[0].step + 1, steps[-1].step)
    print(
        f"\na kill in each {minutes:g} min: {len(steps) - 1} steps in {wall_s:.0f} s, {useful_s:.0f} useful: {share:.3f}"
    )
    for each, cost, other in zip(killed.kills, costs, peer, strict=True):
        shown = "followed too soon" if cost is None else f"{cost:.1f} s"
        print(f"  {each.role:<16} {shown:>18}   a peer, computed: {other:.1f} s")
    print(
        f"  starts of the command {len(run.starts)}, statuses {run.statuses}, cut trajectories {killed.n_cut}"
    )
    print(
        f"  by an undisturbed run {by_undisturbed:.3f}; by its own steps without a kill, {ratio:.2f} times as long, {by_own:.3f}"
    )
    for finding in [*killed.findings, *(f"outlived the flow: {each}" for each in run.left)]:
        print(f"  FOUND {finding}")
    return {
        "share": share,
        "by_own": by_own,
        "by_undisturbed": by_undisturbed,
        "peer_share": useful_s / (useful_s + sum(peer)),
        "wall_s": wall_s,
        "start_s": start_s,
        "kills": len(killed.kills),
        "lost_s": killed.lost_s,
        "cut": killed.n_cut,
        "wrong": len(killed.findings) + len(run.left),
    } | {f"role/{role}": seconds for role, seconds in by_role.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, nargs="+", default=MINUTES, help="N of each run")
    parser.add_argument("--kills", type=int, default=len(ROLES), help="intervals of useful time of each run")
    parser.add_argument("--periods", type=int, default=REFERENCE_PERIODS, help="tens of undisturbed steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept for logs; default: a temporary one")
    given = parser.parse_args()
    # So that the services and the run end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name, serve_run(Path(name)) as services:
        folder = given.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        useful = measure_reference(services, folder, given.periods)
        print(f"undisturbed: {useful.mean:.2f} s a step", flush=True)
        found: dict[float, dict[str, float]] = {}
        for minutes in given.minutes:
            steps = WARM_STEP + 1 + math.ceil(given.kills * minutes * 60.0 / useful.mean)
            killed = run_killed(services, folder, minutes, steps, random.Random(given.seed + int(minutes)))
            found[minutes] = report(minutes, killed, useful)
    print(json.dumps({"benchmark": "failures"} | figures(found, useful)))


def figures(found: dict[float, dict[str, float]], useful: StepSeconds) -> dict[str, Any]:
    """The JSON object of the last line."""
    roles: dict[str, list[float]] = {}
    for each in found.values():
        for key, value in each.items():
            if key.startswith("role/"):
                roles.setdefault(key.removeprefix("role/"), []).append(value)
    costs = {role: round(sum(each) / len(each), 2) for role, each in roles.items()}
    worst = max(costs, key=lambda role: costs[role])
    main_minutes = TARGET_MINUTES if TARGET_MINUTES in found else next(iter(found))
    main_run = found[main_minutes]
    mean_cost_s = sum(costs.values()) / len(costs)
    print(f"\nseconds by role: {costs}\nworst: {worst}, {costs[worst]:g} s; mean {mean_cost_s:.1f} s")
    share = main_run["share"]
    print(
        f"effective_share_{main_minutes:g}min: {share:.3f}, target {TARGET:g}: {'reached' if share >= TARGET else 'MISSED'}"
    )
    return {
        **{f"effective_share_{minutes:g}min": round(each["share"], 3) for minutes, each in found.items()},
        **{f"by_own_steps_{minutes:g}min": round(each["by_own"], 3) for minutes, each in found.items()},
        **{
            f"by_undisturbed_{minutes:g}min": round(each["by_undisturbed"], 3)
            for minutes, each in found.items()
        },
        **{f"peer_share_{minutes:g}min": round(each["peer_share"], 3) for minutes, each in found.items()},
        **{
            f"modelled_share_{minutes}min": round(modelled_share(mean_cost_s, 60.0 * minutes), 3)
            for minutes in MODELLED_MINUTES
        },
        "lost_trajectory_seconds": round(sum(each["lost_s"] for each in found.values()), 3),
        "cut_trajectories": sum(each["cut"] for each in found.values()),
        "findings": sum(each["wrong"] for each in found.values()),
        "kills": sum(each["kills"] for each in found.values()),
        "worst_role": worst,
        "worst_role_s": costs[worst],
        "role_s": costs,
        "mean_cost_s": round(mean_cost_s, 2),
        "step_s": round(useful.mean, 3),
        "start_s": round(main_run["start_s"], 1),
    }


if __name__ == "__main__":
    main()
