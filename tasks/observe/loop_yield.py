"""Yielding to the event loop: calls that become ready together continue one per iteration of the loop."""

import asyncio
from asyncio import AbstractEventLoop
from weakref import WeakKeyDictionary

# A lock belongs to the loop in which it is first awaited, and tests and flows run several loops in a process.
_locks: WeakKeyDictionary[AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def yield_to_loop() -> None:
    """Wait for a lock of the event loop and one iteration of the loop, so that callers return one per iteration, in order."""
    # Prefect holds the loop for about 1 ms when a task run begins and when it ends. Without yielding, a hundred rollouts that
    # finish together would hold it for a hundred times that, and every open request would wait.
    lock = _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        await asyncio.sleep(0)
