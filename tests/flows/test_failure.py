"""Which error out of many a person sees."""

import asyncio
from contextlib import suppress

import pytest

from rollmill.flows.failure import one_error
from rollmill.tasks.errors import ServiceDiedError


async def test_the_cause_is_raised_in_place_of_the_group_that_holds_it() -> None:
    inner = ExceptionGroup("inner", [ValueError("beside"), ServiceDiedError("vLLM", "gone")])
    with pytest.raises(ServiceDiedError), one_error():
        raise ExceptionGroup("outer", [KeyError("first"), inner])


async def test_without_a_rollmill_error_the_first_error_is_raised() -> None:
    with pytest.raises(KeyError), one_error():
        raise ExceptionGroup("outer", [KeyError("first"), ValueError("second")])


async def test_a_time_limit_after_a_failed_task_group_is_one() -> None:
    async def fail() -> None:
        raise ValueError("it failed")

    async def wait_in_vain() -> None:
        async with asyncio.timeout(0.01):
            with suppress(ValueError), one_error():
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait_in_vain()
