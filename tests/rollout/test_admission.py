"""Slots are granted by urgency, then in the order of the requests."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.rollout.admission import Admission, SlotTicket


async def test_slots_are_granted_in_the_order_of_requests() -> None:
    admission = Admission(2)
    with admission.request_slots(3, (0, 0)) as first, admission.request_slots(2, (0, 0)) as second:
        granted = [ticket.granted.done() for ticket in (*first, *second)]
        assert granted == [True, True, False, False, False]
        async with admission.slot(first[0]):
            pass
        assert first[2].granted.done()
        async with admission.slot(first[1]):
            pass
        assert second[0].granted.done()


async def test_the_more_urgent_work_goes_first() -> None:
    admission = Admission(1)
    with admission.request_slots(1, (0, 0)) as held, admission.request_slots(1, (1, 0)) as later:
        with admission.request_slots(1, (0, 1)) as evaluation:
            async with admission.slot(held[0]):
                pass
            assert evaluation[0].granted.done()
            assert not later[0].granted.done()
        assert later[0].granted.done()


async def test_a_ticket_that_is_not_used_is_withdrawn() -> None:
    admission = Admission(1)
    with admission.request_slots(2, (0, 0)):
        pass
    with admission.request_slots(1, (0, 0)) as tickets:
        assert tickets[0].granted.done()


async def test_a_request_cancelled_while_waiting_holds_no_slot() -> None:
    admission = Admission(1)

    async def use(ticket: SlotTicket) -> None:
        async with admission.slot(ticket):
            await asyncio.sleep(0)

    with admission.request_slots(3, (0, 0)) as tickets:
        waiting = asyncio.ensure_future(use(tickets[1]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await use(tickets[0])
        assert tickets[2].granted.done()


async def test_waiting_for_a_slot_ends_at_the_deadline() -> None:
    admission = Admission(1)
    with admission.request_slots(2, (0, 0)) as tickets:
        with pytest.raises(TimeoutError):
            async with admission.slot(tickets[1], asyncio.get_running_loop().time() + 0.01):
                pass
        async with admission.slot(tickets[0]):
            pass
    with admission.request_slots(1, (0, 0)) as again:
        assert again[0].granted.done()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=20), st.integers(1, 6))
def test_never_more_than_the_slots_are_in_flight_and_all_get_their_turn(
    lots: list[tuple[int, int]], n_slots: int
) -> None:
    async def run() -> tuple[int, int]:
        admission, in_flight, most, done = Admission(n_slots), 0, 0, 0

        async def use(ticket: SlotTicket) -> None:
            nonlocal in_flight, most, done
            async with admission.slot(ticket):
                in_flight += 1
                most = max(most, in_flight)
                await asyncio.sleep(0)
                in_flight -= 1
                done += 1

        async def lot(n: int, urgency: int) -> None:
            with admission.request_slots(n, (urgency, 0)) as tickets:
                await asyncio.gather(*(use(ticket) for ticket in tickets))

        await asyncio.gather(*(lot(*each) for each in lots))
        return most, done

    most, done = asyncio.run(run())
    total = sum(n for n, _ in lots)
    assert done == total
    assert most == min(n_slots, total)
