"""A run whose flow is killed at moments of all kinds, while its services stay up, compared with one that is never killed.

The trainer is the real one, its weights go nowhere; the vLLM server is a stub that answers by the sampler's seed
alone. So both runs have the same rollouts, and end with the same weights, bit for bit, if each update was applied once.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flow_processes import DEADLINE_S, Runs

from rollmill.flows.commands.new_runs import prepare_fork
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL, SHORT_RETRIES
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.rollout.completions import turn_seed
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.verify.run_verification import verify_run
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.commands import ExportPolicy
from rollmill.tasks.train.service.trainer_client import TrainerClient
from rollmill.tasks.train.settings_verification import find_wrong_settings
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import Asked, StubVllmServer

pytestmark = pytest.mark.service

STEPS, GROUPS, GROUP_SIZE, N_HELD_OUT = 10, 6, 4, 3
N_REFILLS = 2
ROLLOUT_S, SLOTS = 0.06, 4
TOKEN = "kills"
KILLED_AT = 5
CHANGED = (
    *("train.loss=reinforce", "train.lr=0.02", "train.normalization=sequence", "train.max_grad_norm=0.0"),
    *("train.betas=[0.8,0.9]", "train.weight_decay=0.1", "train.kl.coef=0.3", "train.kl.estimator=k2"),
    *("train.old_logprobs=sampler", "train.importance.mode=truncated", "train.warmup_steps=8"),
)
MEASURED = ("train/loss", "train/gradient_norm", "train/learning_rate", "train/kl", "train/updates")
KEPT = ("rollouts", "scores", "groups", "batches", "evaluations", "logprobs", "annotations")
SAME = [
    "step",
    "group",
    "sample",
    "attempt",
    "example_id",
    "messages",
    "sampling_seed",
    "token_ids",
    "status",
]


@dataclass
class Place:
    """Where runs are killed: services that stay up, and the settings of runs that attach to them."""

    config: RunConfig
    server: StubVllmServer
    runs: Runs
    start_trainer: Callable[[], LaunchedProcess]
    trainer_process: LaunchedProcess

    def folder(self, name: str) -> RunFolder:
        return RunFolder(f"{self.config.store.root}/{name}")

    async def trainer(self, act: Callable[[TrainerClient], Any]) -> Any:
        async with TrainerClient(self.config.train.url, TOKEN, timeout_s=DEADLINE_S) as client:
            return await act(client)

    def finish(self, name: str, *overrides: str) -> None:
        """Start or resume a run, with other settings for those in `overrides`, and wait for its end."""
        self.runs.start(name, overrides=overrides)
        assert self.runs.ended() == 0, self.runs.log.read_text()[-3000:]

    def weights(self, path: Path) -> bytes:
        """Return the trainer's weights as the bytes of a model's file."""
        asyncio.run(self.trainer(lambda client: client.do(ExportPolicy(path=str(path)))))
        return (path / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, prefect_api: str, tied_model: Path) -> Iterator[Place]:
    tmp_path = tmp_path_factory.mktemp("kills")
    ports = free_port(), free_port()
    config = validate_toy(
        {
            "steps": STEPS,
            "model": str(tied_model),
            "rollout": {
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_refill_groups": N_REFILLS,
                "max_in_flight": SLOTS,
                "trajectories_per_task": 2,
                "max_staleness": 1,
            },
            "train": {
                "url": f"http://127.0.0.1:{ports[0]}",
                "old_logprobs": "trainer",
                "kl": {"reference": "frozen", "coef": 0.1},
                "annotate_every": 2,
            },
            "checkpoint": {"every": 3},
            "sync": {"parity_sequences": 0},
            "serve": {"urls": [f"http://127.0.0.1:{ports[1]}"]},
            "evaluate": {"every": 5, "n_prompts": N_HELD_OUT},
            "store": {"root": str(tmp_path / "runs")},
        }
    )
    settings = launch.write_config(config.train, SyncConfig(), ports[0], tmp_path / "trainer")
    script = Path(__file__).with_name("trainer_without_transfer.py")
    environment = launch.build_environment(config.train, TOKEN)

    def start_trainer() -> LaunchedProcess:
        command = [sys.executable, str(script), str(settings)]
        log = tmp_path / "trainer.log"
        return LaunchedProcess.start("trainer", command, log=log, env=environment, stop_grace_s=1.0)

    trainer = start_trainer()
    server = StubVllmServer(tied_model, ROLLOUT_S)
    with serve(server, ports[1]):
        own = {"PREFECT_API_URL": prefect_api, "PYTHONPATH": str(Path(__file__).parents[1] / "servers")}
        runs = Runs(tmp_path, config, environment | QUIET_TERMINAL | SHORT_RETRIES | own)
        try:
            found = Place(config, server, runs, start_trainer, trainer)
            asyncio.run(found.trainer(lambda client: client.wait_until_healthy(DEADLINE_S, trainer)))
            yield found
        finally:
            runs.close()
            found.trainer_process.stop_now()


@pytest.fixture(scope="module")
def whole(place: Place, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that a run ends with that is never killed."""
    place.finish("whole")
    return place.weights(tmp_path_factory.mktemp("weights"))


@contextmanager
def serve(server: StubVllmServer, port: int) -> Iterator[None]:
    control = server.serve(port)
    try:
        yield
    finally:
        control.stop()


def rows(folder: RunFolder, dataset: str) -> pl.DataFrame:
    """All rows of a data set."""
    frame = pl.from_arrow(read(folder, dataset))
    assert isinstance(frame, pl.DataFrame)
    return frame


def n_shards(folder: RunFolder, first: int) -> int:
    """How many shards of rollouts there are from a step on."""
    keys = open_files(folder).keys("rollouts/step=*/*.arrow")
    return sum(int(key.split("/")[1].removeprefix("step=")) >= first for key in keys)


def n_planned(folder: RunFolder) -> dict[int, int]:
    """How many groups each step has, its refills included."""
    plans = rows(folder, "plans").group_by("step").agg(pl.col("n_groups").sum())
    return dict(plans.rows())


def n_trained(folder: RunFolder) -> int:
    """How many steps have a batch."""
    return len(list_steps(folder, "batches"))


def read_requests(folder: RunFolder) -> set[Asked]:
    """The requests whose answers are stored, a trajectory each."""
    found: set[Asked] = set()
    for row in rows(folder, "rollouts").iter_rows(named=True):
        seed = turn_seed(row["sampling_seed"], row["n_prompt_tokens"])
        found.add(Asked(seed, row["temperature"], ""))
    for row in rows(folder, "evaluations").iter_rows(named=True):
        seed = turn_seed(row["sampling_seed"], row["n_prompt_tokens"])
        found.add(Asked(seed, row["temperature"], str(row["policy_version"])))
    return found


def kind_of(asked: Asked, held_out: set[int]) -> Asked:
    """Return a request as `read_requests` has it: held-out ones differ by their version."""
    version = str(PolicyVersion.parse(asked.version).version) if asked.seed in held_out else ""
    return asked._replace(version=version)


def wait_for(moment: Callable[[], bool], pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not moment():
        assert Path(f"/proc/{pid}").exists(), "the run was over before the moment of a kill came"
        assert time.monotonic() < deadline, "the moment of a kill did not come"
        time.sleep(0.003)


def moment_of(folder: RunFolder, chance: random.Random) -> Callable[[], bool]:
    """A moment of one kind: while it starts, by what is stored, within a commit, or while a batch is trained on."""
    first, at_s = n_trained(folder), chance.uniform(0.0, 0.3)
    n = n_shards(folder, first) + chance.randint(1, 6)
    began = time.monotonic()

    def is_later() -> bool:
        nonlocal began
        if n_shards(folder, first) < n:
            began = time.monotonic()
        return time.monotonic() - began >= at_s

    def is_training() -> bool:
        nonlocal began
        if n_trained(folder) <= first:
            began = time.monotonic()
        return n_trained(folder) > first and time.monotonic() - began >= at_s / 3

    kinds: dict[str, Callable[[], bool]] = {
        "starting": lambda: time.monotonic() - began >= 10 * at_s,
        "shards": lambda: n_shards(folder, first) >= n,
        "later": is_later,
        "commit": lambda: folder.tmp.exists() and any(each.is_file() for each in folder.tmp.iterdir()),
        "training": is_training,
    }
    return kinds[chance.choices([*kinds], weights=[2, 4, 5, 4, 4])[0]]


def check_each_once(place: Place, name: str, snapshots: list[dict[str, pl.DataFrame]]) -> None:
    """Nothing twice, and whatever was stored at a kill is as it was."""
    folder = place.folder(name)
    final = {dataset: rows(folder, dataset) for dataset in KEPT}
    for dataset, key in (
        ("rollouts", "trajectory_id"),
        ("scores", "trajectory_id"),
        ("batches", "trajectory_id"),
        ("groups", "group"),
        ("annotations", "trajectory_id"),
    ):
        assert final[dataset][key].is_unique().all(), dataset
    planned = n_planned(folder)
    assert all(GROUPS <= n <= GROUPS + N_REFILLS for n in planned.values())
    assert len(final["rollouts"]) == len(final["scores"]) == sum(planned.values()) * GROUP_SIZE
    assert len(final["groups"]) == sum(planned.values()) > STEPS * GROUPS
    assert len(final["evaluations"]) == final["evaluations"]["trajectory_id"].n_unique() == 3 * 2 * N_HELD_OUT
    annotated = final["batches"].filter(pl.col("step") % 2 == 0)
    assert set(final["annotations"]["trajectory_id"]) <= set(annotated["trajectory_id"])
    assert final["annotations"]["step"].n_unique() == STEPS // 2
    for policy in ("reference", "trainer"):
        each = read(folder, "logprobs", ["trajectory_id"], policy=policy)["trajectory_id"].to_pylist()
        assert len(each) == len(set(each)) >= len(final["batches"]), policy
    assert not verify_run(folder).findings
    staleness = final["rollouts"]["step"] - final["rollouts"]["policy_version_first"]
    assert staleness.is_in([0, 1]).all()
    for stored in snapshots:
        for dataset, before in stored.items():
            key = [name for name in ("trajectory_id", "group", "step", "model") if name in before.columns]
            after = final[dataset].join(before.select(key), on=key, how="semi")
            assert after.sort(key).equals(before.sort(key)), dataset


def run_with_kills(
    place: Place, name: str, n_kills: int, chance: random.Random, overrides: Sequence[str] = ()
) -> None:
    folder, server = place.folder(name), place.server
    snapshots: list[dict[str, pl.DataFrame]] = []
    acknowledged: list[tuple[int, set[Asked]]] = []
    for _ in range(n_kills):
        pid = place.runs.start(name, overrides=overrides)
        moment = moment_of(folder, chance)
        wait_for(moment, pid)
        os.kill(pid, signal.SIGKILL)
        assert place.runs.ended() == -signal.SIGKILL
        snapshots.append({dataset: rows(folder, dataset) for dataset in KEPT})
        acknowledged.append((len(server.asked), read_requests(folder)))
    place.finish(name, *overrides)
    check_each_once(place, name, snapshots)
    held_out = {each.seed for each in read_requests(folder) if each.version}
    for first, before in acknowledged:
        again = {kind_of(each, held_out) for each in server.asked[first:]} & before
        assert not again, f"generated twice: {again}"


def check_same(place: Place, name: str, other: str = "whole") -> None:
    """A run's rollouts and batches are those of the run that was never killed, but for the run's id."""
    both = [place.folder(each) for each in (other, name)]
    for dataset, columns, key in (
        ("rollouts", SAME, ["step", "group", "sample"]),
        ("batches", ["step", "order", "group", "sample", "advantage", "reward"], ["step", "order"]),
    ):
        first, second = (rows(folder, dataset).select(columns).sort(key) for folder in both)
        assert first.equals(second), dataset


@pytest.mark.parametrize("n_kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_again_and_again_is_the_run_that_never_was(
    place: Place, whole: bytes, n_kills: int, tmp_path: Path
) -> None:
    name = f"killed-{n_kills}"
    run_with_kills(place, name, n_kills, random.Random(n_kills))
    check_same(place, name)
    assert place.weights(tmp_path) == whole, "the updates are not those of a run never killed"


@pytest.mark.long
def test_trajectories_of_several_segments_are_kept_and_trained_on_once_whenever_the_flow_is_killed(
    place: Place, tmp_path: Path
) -> None:
    n_kills = 20
    overrides = ("rollout.environment=segment_environments:Segments", "score.scorer=environment")
    whole, killed = f"segments-{n_kills}", f"killed-segments-{n_kills}"
    place.finish(whole, *overrides)
    weights = place.weights(tmp_path / "whole")
    segments = rows(place.folder(whole), "rollouts")["segment_starts"].list.len()
    # A compacting episode has three, one with a sub-agent has two.
    assert set(segments) == {2, 3}
    run_with_kills(place, killed, n_kills, random.Random(n_kills), overrides)
    check_same(place, killed, whole)
    assert place.weights(tmp_path / "killed") == weights


def test_an_attached_trainer_that_dies_is_awaited_and_loads_what_the_folder_has(
    place: Place, whole: bytes, tmp_path: Path
) -> None:
    folder = place.folder("awaited")
    pid = place.runs.start("awaited")
    wait_for(lambda: n_trained(folder) >= 4, pid)
    place.trainer_process.stop_now()
    wait_for(lambda: "waiting 1800 s for its return" in place.runs.log.read_text(), pid)
    place.trainer_process = place.start_trainer()
    assert place.runs.ended() == 0, place.runs.log.read_text()[-3000:]
    check_same(place, "awaited")
    assert place.weights(tmp_path) == whole


def read_training(folder: RunFolder) -> pl.DataFrame:
    """What is measured of each step's updates, the last values of a step that was applied again."""
    stored = rows(folder, "metrics").filter(pl.col("name").is_in(MEASURED)).drop("run")
    return stored.unique(["step", "name", "env", "stat"], keep="last").sort("step", "name", "env", "stat")


@pytest.mark.long
def test_a_run_killed_and_resumed_with_other_settings_is_one_that_changed_them_at_the_same_step(
    place: Place, tmp_path: Path
) -> None:
    killed, changed = place.folder("killed-changed"), place.folder("changed")
    pid = place.runs.start("killed-changed")
    # After a checkpoint, so that some batches are applied again, and before the next one.
    wait_for(lambda: n_trained(killed) >= KILLED_AT, pid)
    os.kill(pid, signal.SIGKILL)
    assert place.runs.ended() == -signal.SIGKILL
    step = n_trained(killed)
    place.finish("killed-changed", f"steps={step + 3}", *CHANGED)
    weights = place.weights(tmp_path / "killed")
    log = place.runs.log.read_text()

    place.finish("changed", f"steps={step}")
    place.finish("changed", f"steps={step + 3}", *CHANGED)

    assert place.weights(tmp_path / "changed") == weights
    check_same(place, "killed-changed", "changed")
    assert read_training(killed).equals(read_training(changed))
    assert f"from step {step} on: train.loss: 'ppo_clip' -> 'reinforce', train.lr: 0.001 -> 0.02" in log
    for folder in (killed, changed):
        assert not verify_run(folder, more=[find_wrong_settings]).findings
        assert [each.until_step for each in read_manifest(folder).earlier_settings] == [step]


def test_a_fork_under_the_same_settings_ends_where_its_source_did(
    place: Place, whole: bytes, tmp_path: Path
) -> None:
    prepare_fork(place.folder("whole"), 5, "forked", ())
    place.finish("forked")
    check_same(place, "forked")
    assert place.weights(tmp_path) == whole
    stored = rows(place.folder("forked"), "rollouts")
    assert stored.group_by("run").agg(pl.col("step").min()).sort("step")["step"].to_list() == [0, 5]
    n_groups = sum(n for step, n in n_planned(place.folder("forked")).items() if step >= 5)
    n_sampled, n_evaluated = n_groups * GROUP_SIZE, 2 * 2 * N_HELD_OUT
    run = read_manifest(place.folder("forked")).run
    asked = [each for each in place.server.asked if each.version.startswith(f"{run}:")]
    assert len(asked) == n_sampled + n_evaluated
