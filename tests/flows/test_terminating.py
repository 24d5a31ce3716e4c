"""SIGTERM to a flow's process cancels the flow wherever it happens to be, once."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from prefect.exceptions import TerminationSignal
from prefect.utilities import engine

from flows.failure import behind
from flows.ui.terminating import ended_in_order


@pytest.fixture(autouse=True)
def _prefects_handler() -> Iterator[None]:
    """That of Prefect, as inside of a flow run."""
    before = signal.signal(signal.SIGTERM, engine._prefect_sigterm_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_in_a_callback_of_the_loop_ends_the_flow_after_its_cleanup() -> None:
    done: list[str] = []

    async def flow() -> None:
        with ended_in_order():
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


async def test_a_signal_in_code_that_catches_everything_ends_the_flow_and_no_other_task() -> None:
    async def careless() -> str:
        try:
            terminate()
        except BaseException:  # noqa: BLE001 - as in a scorer's call
            return "caught"
        return "went on"

    async def flow() -> None:
        with ended_in_order():
            await asyncio.gather(scoring, asyncio.sleep(60))

    scoring = asyncio.create_task(careless())
    with pytest.raises(asyncio.CancelledError):
        await flow()
    assert scoring.result() == "went on"


async def test_what_does_not_end_well_after_a_signal_is_ended_by_it_all_the_same() -> None:
    async def flow() -> None:
        with ended_in_order():
            terminate()
            try:
                await asyncio.sleep(60)
            finally:
                raise OSError("a service did not end")

    with pytest.raises(asyncio.CancelledError) as raised:
        await flow()
    assert {type(each) for each in behind(raised.value)} >= {TerminationSignal, OSError}


async def test_prefect_acknowledges_a_cancel_meanwhile_and_has_its_own_handler_afterwards() -> None:
    prefects = engine._prefect_sigterm_handler
    with ended_in_order():
        assert signal.getsignal(signal.SIGTERM) is not prefects
        assert engine.can_ack_control_intent()
    assert signal.getsignal(signal.SIGTERM) is prefects is engine._prefect_sigterm_handler
    with pytest.raises(TerminationSignal):
        terminate()


async def test_another_handler_than_prefects_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ended_in_order():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
