"""A deployed run cancelled in each of its phases and retried after each; one whose worker is killed with all it started."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from deployed_run import DEADLINE_S, ENDED, Deployed, deploy
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from rollmill.flows.post_train import post_train
from rollmill.flows.prefect_integration.work_pools import put_automations, read_automations
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.verify.run_verification import verify_run
from rollmill.tasks.store.verify.run_views import Finding
from rollmill.tasks.sync.weight_messages import SendResult
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.service.answers import CheckpointWritten, StepResult
from rollmill.tasks.train.service.commands import AwaitCheckpoint, SendWeights, TrainStep
from tests.stubs.toy_settings import validate_toy
from tests.stubs.trainer import StubTrainer

pytestmark = [pytest.mark.service, pytest.mark.long]

STEPS = 4
ROLLOUT = {"groups_per_step": 6, "group_size": 4, "max_in_flight": 64}
"""An evaluation runs during the rollouts of a whole step."""

SHORT_S = 60
"""Instead of the automation's 240 s: more than the 30 s between two heartbeats."""


class HeldTrainer(StubTrainer):
    """Stays in a phase of its work from when it comes to it until it is let go."""

    def __init__(self, settings: TrainConfig) -> None:
        super().__init__(0.0, 0.0, settings)
        self._phase, self._is_reached, self._may_continue = "", threading.Event(), threading.Event()

    def hold(self, phase: str) -> None:
        self._is_reached.clear()
        self._may_continue.clear()
        self._phase = phase

    def let_go(self) -> None:
        self._phase = ""
        self._may_continue.set()

    def is_held(self) -> bool:
        return self._is_reached.is_set()

    def _stay(self, phase: str) -> None:
        if self._phase == phase:
            self._is_reached.set()
            self._may_continue.wait(DEADLINE_S)

    def _train(self, command: TrainStep) -> StepResult:
        self._stay("training")
        return super()._train(command)

    def _send(self, command: SendWeights) -> list[SendResult]:
        self._stay("sync")
        return super()._send(command)

    def _await_checkpoint(self, command: AwaitCheckpoint) -> CheckpointWritten:
        self._stay("checkpoint")
        return super()._await_checkpoint(command)


@pytest.fixture(autouse=True)
def _server(prefect_api: str) -> Any:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield


@pytest.fixture
async def _impatient_automation(_server: None) -> AsyncIterator[None]:
    """The shipped automation, sooner, as long as a test runs."""
    await put_automations([sooner(each) for each in read_automations()])
    yield
    await put_automations(read_automations())


@pytest.fixture
def trainer() -> Iterator[tuple[HeldTrainer, dict[str, Any]]]:
    """A trainer that can be held in a phase, and the settings of a run that attaches to it."""
    port = free_port()
    settings = {"url": f"http://127.0.0.1:{port}", "max_skipped_steps": STEPS}
    held = HeldTrainer(validate_toy({"train": settings}).train)
    control = held.serve(port)
    try:
        yield held, settings
    finally:
        held.let_go()
        control.stop()


async def test_a_run_cancelled_in_each_phase_leaves_nothing_behind_and_resumes(
    workplace: Any, stub_python: str, set_stub: Any, trainer: tuple[HeldTrainer, dict[str, Any]]
) -> None:
    held, settings = trainer
    values = {"train": settings, "serve": {"python": stub_python}, "rollout": ROLLOUT}
    async with deploy(workplace, post_train, steps=STEPS, **values) as run:
        with workplace.worker(run.pool, ROLLMILL_TRAINER_TOKEN=held.token):
            set_stub(is_down=True)
            flow_run = await run.start()
            await run.when_going(flow_run, lambda: "vllm.entrypoints" in str(run.of_run()))
            await check_cancelled(run, flow_run, "services starting")

            set_stub(rollout_s=DEADLINE_S)
            for phase, task_run in (("sampling", "/ rollout "), ("evaluation", "/ evaluate ")):
                await run.retried(flow_run)
                await run.when_task_run(flow_run, task_run)
                await check_cancelled(run, flow_run, phase)

            set_stub()
            for phase in ("training", "sync", "checkpoint"):
                await check_held(run, flow_run, held, phase)

            await run.retried(flow_run)
            assert await run.when_over(flow_run) == StateType.COMPLETED, run.log()
        assert run.steps() == STEPS
        assert not findings(run)


async def check_held(run: Deployed, flow_run: UUID, held: HeldTrainer, phase: str) -> None:
    """Retry a run, and cancel it when the trainer is in a phase of its work, which it stays in until the run is over."""
    held.hold(phase)
    await run.retried(flow_run)
    await run.when_going(flow_run, held.is_held)
    await check_cancelled(run, flow_run, phase)
    held.let_go()


async def check_cancelled(run: Deployed, flow_run: UUID, phase: str) -> None:
    """Cancel a run; check that no process of it is left and that no work of it is shown as running."""
    await run.cancelled(flow_run)
    assert not findings(run), phase
    assert await run.work(flow_run) <= ENDED, phase


@pytest.mark.usefixtures("_impatient_automation")
async def test_a_run_whose_worker_is_killed_is_marked_crashed_and_a_retry_marks_its_work(
    workplace: Any, stub_python: str, set_stub: Any, trainer: tuple[HeldTrainer, dict[str, Any]]
) -> None:
    held, settings = trainer
    workplace.environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = "30"
    token = {"ROLLMILL_TRAINER_TOKEN": held.token}
    values = {"train": settings, "serve": {"python": stub_python}, "rollout": ROLLOUT}
    async with deploy(workplace, post_train, steps=STEPS, **values) as run:
        with workplace.worker(run.pool, **token) as worker:
            set_stub(rollout_s=DEADLINE_S)
            flow_run = await run.start()
            await run.when_task_run(flow_run, "/ rollout ")
            os.kill(worker.pid, signal.SIGKILL)
            for pid in flow_processes(run):
                os.kill(pid, signal.SIGKILL)
        await run.when(flow_run, lambda _: not run.of_run())
        assert await run.when_over(flow_run) == StateType.CRASHED
        assert "Running" in await run.work(flow_run)
        set_stub()
        with workplace.worker(run.pool, **token):
            await run.retried(flow_run)
            assert await run.when_over(flow_run) == StateType.COMPLETED, run.log()
        assert await run.work(flow_run) == {"Completed", "Crashed"}
        assert run.steps() == STEPS
        assert not findings(run)


def findings(run: Deployed) -> list[Finding]:
    """What `rollmill verify` finds wrong, but for checkpoints: the stub trainer writes none."""
    return [each for each in verify_run(run.folder).findings if "/checkpoints/" not in each.where]


def sooner(automation: Any) -> Any:
    """The automation, less patient."""
    trigger = automation.trigger.model_copy(update={"within": timedelta(seconds=SHORT_S)})
    return automation.model_copy(update={"trigger": trigger})


def flow_processes(run: Deployed) -> list[int]:
    """Those that a worker has started; what they started ends by itself."""
    return [pid for pid, line in run.of_run().items() if "prefect" in line]
