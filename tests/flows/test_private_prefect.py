"""Prefect's private API: the names that are used are there, and what they are used for holds."""

import asyncio
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import prefect._flow_run_suspension as suspension
import pytest
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal
from prefect.logging import disable_run_logger
from prefect.states import Suspended
from prefect.utilities import engine

from rollmill.flows.failure import causes
from rollmill.flows.prefect_integration.private_prefect import (
    PRIVATE_NAMES,
    SIGTERM_HANDLER,
    PrivateName,
    StepPauses,
    end_in_order,
    release_finished_tasks,
)
from rollmill.flows.prefect_integration.work_pools import read_automations


@pytest.mark.parametrize("each", PRIVATE_NAMES, ids=lambda each: f"{each.module}.{each.name}")
def test_the_installed_prefect_has_every_private_name(each: PrivateName) -> None:
    assert each.find() is not None, f"Prefect {version('prefect')}: {each.without}"


def test_a_suspension_that_prefect_requests_makes_the_pause_due() -> None:
    flow_run_id, pauses = uuid4(), StepPauses(3, lambda: None)
    with suspension.register_flow_run_suspension_request(flow_run_id, pauses):  # type: ignore[arg-type]
        assert suspension.mark_flow_run_suspension_requested(flow_run_id, Suspended())
    assert pauses.is_due(1)


def test_a_missing_name_is_reported_with_what_works_differently(capsys: pytest.CaptureFixture[str]) -> None:
    with disable_run_logger():
        assert PrivateName("prefect.utilities.engine", "gone", "pausing ends a step").find() is None
        assert PrivateName("prefect.gone", "gone", "").find() is None
        assert PrivateName("prefect.context", "FlowRunContext.gone", "").find() is None
    assert "this Prefect has no prefect.utilities.engine.gone" in capsys.readouterr().err


def test_a_pause_is_due_before_the_next_step_and_not_after_the_last() -> None:
    calls: list[bool] = []
    pauses = StepPauses(3, lambda: calls.append(True))
    assert not pauses.is_due(1)
    pauses.before(1)
    state = Suspended()
    pauses.mark_requested(state)
    pauses.mark_requested(state)
    assert calls == [True]
    # Step 1 began before the request.
    pauses.before(1)
    assert pauses.is_due(2)
    with disable_run_logger(), pytest.raises(Pause) as raised:
        pauses.before(2)
    assert raised.value.state is state
    assert not pauses.is_due(3)
    pauses.before(3)


def test_the_automation_waits_for_longer_than_prefects_default_between_two_heartbeats() -> None:
    (automation,) = read_automations()
    assert automation.trigger.within.total_seconds() > 180
    assert "prefect.flow-run.heartbeat" in automation.trigger.after & automation.trigger.expect


class Result:
    """What a task returned."""


def test_memory_of_ended_task_runs_is_released_and_a_result_in_use_still_names_its_task_run() -> None:
    import weakref

    used, gone = Result(), Result()
    results: dict[int, Any] = {
        1: ("state", "task run", weakref.ref(used)),
        2: ("state", "task run", weakref.ref(gone)),
        3: ("state", "task run", None),
    }
    del gone
    with FlowRunContext.model_construct(run_results=results, task_run_assets={uuid4(): set()}) as context:
        release_finished_tasks()
    assert list(context.run_results) == [1]
    assert context.task_run_assets == {}
    release_finished_tasks()  # without a flow run there is nothing to release


@pytest.fixture
def _prefects_handler() -> Iterator[None]:
    """That of Prefect, as inside of a flow run."""
    before = signal.signal(signal.SIGTERM, engine._prefect_sigterm_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("_prefects_handler")
async def test_a_signal_in_a_callback_of_the_loop_ends_the_flow_after_its_cleanup() -> None:
    done: list[str] = []

    async def flow() -> None:
        with end_in_order():
            asyncio.get_running_loop().call_soon(terminate)
            try:
                await asyncio.sleep(60)
            finally:
                terminate()  # a second one does not cut off what ends
                await asyncio.sleep(0)
                done.append("cleaned up")

    with pytest.raises(asyncio.CancelledError):
        await flow()
    assert done == ["cleaned up"]


@pytest.mark.usefixtures("_prefects_handler")
async def test_a_signal_in_code_that_catches_everything_ends_the_flow_and_no_other_task() -> None:
    async def careless() -> str:
        try:
            terminate()
        except BaseException:  # noqa: BLE001 - as in a scorer's call
            return "caught"
        return "continued"

    async def flow() -> None:
        with end_in_order():
            await asyncio.gather(scoring, asyncio.sleep(60))

    scoring = asyncio.create_task(careless())
    with pytest.raises(asyncio.CancelledError):
        await flow()
    assert scoring.result() == "continued"


@pytest.mark.usefixtures("_prefects_handler")
async def test_a_flow_whose_cleanup_fails_after_a_signal_still_ends_by_it() -> None:
    async def flow() -> None:
        with end_in_order():
            terminate()
            try:
                await asyncio.sleep(60)
            finally:
                raise OSError("a service did not end")

    with pytest.raises(asyncio.CancelledError) as raised:
        await flow()
    assert {type(each) for each in causes(raised.value)} >= {TerminationSignal, OSError}


@pytest.mark.usefixtures("_prefects_handler")
async def test_prefect_acknowledges_a_cancel_meanwhile_and_has_its_own_handler_afterwards() -> None:
    prefects = getattr(engine, SIGTERM_HANDLER.name)
    with end_in_order():
        assert signal.getsignal(signal.SIGTERM) is not prefects
        assert engine.can_ack_control_intent()
    assert signal.getsignal(signal.SIGTERM) is prefects is engine._prefect_sigterm_handler
    with pytest.raises(TerminationSignal):
        terminate()


@pytest.mark.usefixtures("_prefects_handler")
async def test_another_handler_than_prefects_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with end_in_order():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.usefixtures("_prefects_handler")
async def test_a_prefect_without_the_handlers_name_ends_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(engine, SIGTERM_HANDLER.name)
    before = signal.getsignal(signal.SIGTERM)
    with disable_run_logger(), end_in_order():
        assert signal.getsignal(signal.SIGTERM) is before
