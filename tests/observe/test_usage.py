"""What a piece of work takes is found: what holds the loop, what runs below, what memory it needs."""

import asyncio
import subprocess
import sys
import time

import psutil

from rollmill.tasks.observe.usage import UsageMeter

HELD_S = 1.0
BURNED_S = 0.5
MEMORY_BYTES = 100_000_000


async def test_what_holds_the_loop_is_measured_and_named() -> None:
    measuring = UsageMeter()
    async with measuring.measure():
        await asyncio.sleep(0.02)
        time.sleep(HELD_S)  # noqa: ASYNC251 - it is to hold the loop
        await asyncio.sleep(0.02)
    usage = measuring.usage
    assert usage.wall_s >= HELD_S
    assert usage.lag_max_ms >= 900.0 * HELD_S
    assert "test_what_holds_the_loop" in usage.longest


async def test_cpu_of_this_process_and_of_its_children_are_separate() -> None:
    burn = f"import time\nwhile time.process_time() < {BURNED_S}: pass"
    measuring, before = UsageMeter(), time.process_time()
    async with measuring.measure():
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", burn], check=True)
    assert measuring.usage.below_cpu_s >= 0.9 * BURNED_S
    assert measuring.usage.cpu_s <= time.process_time() - before


async def test_processes_that_are_apart_do_not_count() -> None:
    burn = f"import time\nwhile time.process_time() < {BURNED_S}: pass\nprint()\ninput()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    of_other_tests = [each.pid for each in psutil.Process().children()]
    with subprocess.Popen([sys.executable, "-c", burn], **streams) as process:  # noqa: ASYNC220
        measuring = UsageMeter([*of_other_tests, process.pid])
        async with measuring.measure():
            await asyncio.to_thread(process.stdout.readline)
        process.communicate(b"\n")
    assert measuring.usage.below_cpu_s < 0.5 * BURNED_S


def test_memory_that_is_given_back_is_in_the_peak_and_not_in_the_growth() -> None:
    # In a new process: other tests' threads take and give back memory in this one.
    script = f"""
import asyncio
from rollmill.tasks.observe.process_memory import own_rss_bytes
from rollmill.tasks.observe.usage import UsageMeter

async def taken_and_given_back():
    before, measuring = own_rss_bytes(), UsageMeter()
    async with measuring.measure():
        held = bytearray({MEMORY_BYTES})
        held[:] = b"x" * {MEMORY_BYTES}
        del held
    print(measuring.usage.rss_peak_bytes - before, measuring.usage.rss_growth_bytes)

asyncio.run(taken_and_given_back())
"""
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    above, growth = map(int, shown.stdout.split())
    assert growth < MEMORY_BYTES / 2
    assert above >= MEMORY_BYTES
