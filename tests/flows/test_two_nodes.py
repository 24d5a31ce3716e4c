"""A trainer on two machines and a vLLM server on a third, which are namespaces of this machine."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import polars as pl
import pytest
import yaml
from network_nodes import Node, network_nodes

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.train.service.commands import ExportPolicy
from rollmill.tasks.train.service.trainer_client import TrainerClient
from tests.stubs.toy_settings import toy_values

pytestmark = [pytest.mark.service, pytest.mark.long]

STEPS, DEADLINE_S = 2, 600.0
TRAINER_PORT, MEETING_PORT, VLLM_PORT = 8700, 29400, 8000
KEYS = {"ROLLMILL_TRAINER_TOKEN": "two-nodes", "ROLLMILL_VLLM_API_KEY": "two-nodes"}
SCORER = "def length(candidate):\n    return (len(candidate.answer) % 7) / 7\n"
"""Rewards that are spread whatever a model with random weights answers."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    try:
        # The alias has the other node's address first, as a headless service of Kubernetes may.
        with network_nodes(
            ["first", "second", "server"], {"trainer": ["second", "first"]}, tmp_path
        ) as found:
            yield found
    except FileNotFoundError as error:
        pytest.skip(f"{error.filename} is not here (Debian: apt install iproute2 util-linux)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces for this user: {error.cmd}: {error.stderr.decode()}")


def write_settings(workplace: Any, model: Path, nodes: list[Node]) -> None:
    first, _, server = nodes
    (workplace.folder / "rewards.py").write_text(SCORER)
    values = toy_values(
        {
            "steps": STEPS,
            "model": str(model),
            "rollout": {"groups_per_step": 4, "group_size": 4},
            "score": {"scorer": "rewards:length"},
            "train": {
                "url": f"http://{first.address}:{TRAINER_PORT}",
                "ranks": 2,
                "warmup_steps": 0,
                # The sampler's log-probabilities depend on which requests it computes together.
                "old_logprobs": "trainer",
            },
            "sync": {"host": "trainer", "verify_every": 1},
            "checkpoint": {"every": 1},
            "serve": {
                "urls": [f"http://{server.address}:{VLLM_PORT}"],
                "python": str(workplace.vllm_python),
            },
            "evaluate": {"every": 0, "n_prompts": 4},
            "store": {"root": str(workplace.folder / "runs")},
        }
    )
    (workplace.folder / "conf" / "nodes.yaml").write_text(yaml.safe_dump(values))


def start_services(workplace: Any, nodes: list[Node]) -> None:
    rollmill, environment = str(Path(sys.executable).parent / "rollmill"), workplace.environment | KEYS
    for number, node in enumerate(nodes[:2]):
        words = ["trainer", "nodes", "--nodes", "2", "--node", str(number), "--port", str(TRAINER_PORT)]
        words += ["--rendezvous", f"first:{MEETING_PORT}", "--host", "first"]
        node.run([rollmill, *words], environment, workplace.folder)
    words = ["vllm", "nodes", "--host", "server", "--port", str(VLLM_PORT)]
    nodes[2].run([rollmill, *words], environment, workplace.folder)


async def wait_for_services(nodes: list[Node]) -> None:
    first, _, server = nodes
    urls = [f"http://{first.address}:{TRAINER_PORT}/v1/health", f"http://{server.address}:{VLLM_PORT}/health"]
    async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(trust_env=False) as client:
        while urls:
            try:
                await client.get(urls[0])
            except httpx.TransportError:
                await asyncio.sleep(0.2)
            else:
                del urls[0]


async def export_weights(node: Node, path: Path) -> bytes:
    """Return the weights of the trainer's policy, as a model's file."""
    url, token = f"http://{node.address}:{TRAINER_PORT}", KEYS["ROLLMILL_TRAINER_TOKEN"]
    async with TrainerClient(url, token, timeout_s=DEADLINE_S) as client:
        await client.do(ExportPolicy(path=str(path)))
    return (path / "model.safetensors").read_bytes()


def wait_for_batch(process: "subprocess.Popen[str]", run: Path) -> None:
    """Wait until a run has stored a batch, while it trains on it or sends the weights."""
    deadline = time.monotonic() + DEADLINE_S
    while not [*run.glob("batches/step=*")]:
        assert process.poll() is None, "the run ended before its first batch"
        assert time.monotonic() < deadline, "the run did not store a batch"
        time.sleep(0.003)


def test_two_nodes_train_and_sync_and_resume_after_one_of_them_is_lost(
    workplace: Any, tied_model: Path, nodes: list[Node]
) -> None:
    write_settings(workplace, tied_model, nodes)
    start_services(workplace, nodes)
    workplace.environment |= KEYS
    asyncio.run(wait_for_services(nodes))
    runs = workplace.folder / "runs"

    whole = workplace.run("run", "nodes", "--name", "whole")
    assert whole.returncode == 0, whole.stdout + logs(nodes)
    expected = asyncio.run(export_weights(nodes[0], workplace.folder / "whole"))

    process = workplace.start("run", "nodes", "--name", "killed")
    wait_for_batch(process, runs / "killed")
    nodes[1].kill()
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output + logs(nodes)
    assert "for its return" in output

    for name in ("whole", "killed"):
        metrics = read_metrics(runs / name)
        assert [metrics[step, "train/updated"] for step in range(STEPS)] == [1.0] * STEPS
        assert metrics[STEPS - 1, "sync/parity_alarms"] == 0
        verified = workplace.run("verify", name)
        assert verified.returncode == 0, verified.stdout
    assert read_tokens(runs / "killed") == read_tokens(runs / "whole")
    assert asyncio.run(export_weights(nodes[0], workplace.folder / "killed-weights")) == expected


def logs(nodes: list[Node]) -> str:
    return "".join(f"\n{node.log.name}:\n{node.log.read_text()[-3000:]}" for node in nodes)


def read_metrics(run: Path) -> dict[tuple[int, str], float]:
    """Values of the metrics of all environments, by step and name."""
    rows = pl.scan_ipc(run / "metrics/**/*.arrow", hive_partitioning=True).unique()
    found = rows.filter(pl.col("env") == "all").select("step", "name", "value").collect()
    return {(step, name): value for step, name, value in found.iter_rows()}


def read_tokens(run: Path) -> list[dict[str, Any]]:
    """Sampled tokens and their place in the run."""
    rows = read(RunFolder(str(run)), "rollouts", ["step", "group", "sample", "token_ids"])
    return sorted(rows.to_pylist(), key=lambda row: (row["step"], row["group"], row["sample"]))
