"""A trainer on two nodes, here two agents on one machine that meet by address."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmill.tasks.errors import ConfigError, ServiceDiedError
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder, checkpoint_key
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service import launch
from rollmill.tasks.train.service.commands import (
    AwaitCheckpoint,
    BeginCheckpoint,
    DigestState,
    LoadPolicy,
    TrainStep,
)
from rollmill.tasks.train.service.launch import Nodes
from rollmill.tasks.train.service.trainer_client import TrainerClient

END_S = 120.0


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        (Nodes(3, 0, "head:29400"), "train.ranks"),
        (Nodes(2, 2, "head:29400"), "--node"),
        (Nodes(2, 1), "--rendezvous"),
        (Nodes(2, 1, "head"), "--rendezvous"),
    ],
)
def test_nodes_that_cannot_meet_are_refused(nodes: Nodes, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        nodes.check(4)
    assert refused.value.field == field


def test_the_interface_between_nodes_is_that_of_the_way_to_node_0() -> None:
    assert Nodes(2, 1, "127.0.0.1:29400").find_interface() == "lo"


@pytest.mark.parametrize(
    ("rendezvous", "reason"),
    [("no-such-node.invalid:29400", "no way to it"), ("127.0.1.1:29400", "resolves it to loopback")],
)
def test_a_rendezvous_that_other_nodes_cannot_reach_is_refused(rendezvous: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        Nodes(2, 0, rendezvous).find_interface()
    assert refused.value.field == "--rendezvous"


async def until_it_is_gone(client: TrainerClient) -> None:
    while True:
        await client.health()
        await asyncio.sleep(0.2)


@asynccontextmanager
async def two_nodes(
    config: TrainConfig, folder: Path
) -> AsyncIterator[tuple[TrainerClient, list[LaunchedProcess]]]:
    """Start a trainer of two agents, each with separate logs and a separate folder for unfinished files."""
    port, token, meeting = free_port(), secrets.token_hex(8), f"127.0.0.1:{free_port()}"
    processes = []
    for number in range(2):
        logs = folder / f"node-{number}"
        file = launch.write_config(config, SyncConfig(), port, logs, heartbeat_timeout_s=6.0)
        command = launch.build_command(config, file, Nodes(2, number, meeting))
        environment = launch.build_environment(config, token) | {SCRATCH_ENV: str(logs / "scratch")}
        log = logs / "trainer.log"
        processes.append(
            LaunchedProcess.start(f"node {number}", command, log=log, env=environment, stop_grace_s=2.0)
        )
    try:
        async with TrainerClient(f"http://127.0.0.1:{port}", token, timeout_s=END_S) as client:
            assert (await client.wait_until_healthy(END_S, processes[0])).world_size == 2
            yield client, processes
    finally:
        await asyncio.gather(*(each.stop() for each in processes))


@pytest.mark.service
async def test_two_nodes_train_write_one_checkpoint_and_end_with_each_other(
    tiny_model: Path, batches: Any, tmp_path: Path
) -> None:
    config, run = TrainConfig(ranks=2, zero_stage=3), tmp_path / "run"
    digest = batches.write_step(run, 0, batches.uneven_rows(8))
    async with two_nodes(config, tmp_path) as (client, processes):
        await client.do(
            LoadPolicy(
                run_id="r", incarnation=1, model=str(tiny_model), folder=str(run), checkpoint=None, version=0
            )
        )
        assert (await client.do(TrainStep(folder=str(run), run_id="r", step=0, digest=digest))).updated
        await client.do(BeginCheckpoint(folder=str(run), version=1))
        await client.do(AwaitCheckpoint(version=1))
        names = sorted(path.name for path in (run / "checkpoints" / "version=000001").iterdir())
        assert names == ["COMPLETE.json", *(f"rank-0000{rank}-of-00002.safetensors" for rank in range(2))]
        await processes[1].stop()
        with pytest.raises(ServiceDiedError, match="trainer"):
            await until_it_is_gone(client)
        assert await asyncio.wait_for(processes[0].wait(), END_S) != 0
        log = (tmp_path / "node-0" / "trainer.log").read_text()
        assert "rank 1 has been silent" in log


@pytest.mark.service
async def test_nodes_keep_their_files_of_the_last_checkpoint_alone_and_fetch_the_others(
    tiny_model: Path, s3_root: str, tmp_path: Path
) -> None:
    run = RunFolder(f"{s3_root}/run")
    begun = OpenRun.open(run, config={}, fixed={}, versions={}, git_commit="", config_of=StoreConfig())
    here = {"run_id": "r", "model": str(tiny_model), "folder": run.location}

    def kept() -> list[list[str]]:
        folders = [tmp_path / f"node-{number}" / "scratch" for number in range(2)]
        return [sorted(f"{each.parent.name}/{each.name}" for each in at.rglob("rank-*")) for at in folders]

    names = [f"version=000001/rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    async with two_nodes(TrainConfig(ranks=2), tmp_path) as (client, _):
        for version in range(2):
            await client.do(
                LoadPolicy(**here, incarnation=begun.next_incarnation(), checkpoint=None, version=version)
            )
            await client.do(BeginCheckpoint(folder=run.location, version=version))
            await client.do(AwaitCheckpoint(version=version))
        assert kept() == [[names[0]], [names[1]]]
        before = await client.do(DigestState())
        stored = run.path(checkpoint_key(1))
        await client.do(
            LoadPolicy(**here, incarnation=begun.next_incarnation(), checkpoint=stored, version=1)
        )
        assert kept() == [names, names]
        assert await client.do(DigestState()) == before
    begun.close()
