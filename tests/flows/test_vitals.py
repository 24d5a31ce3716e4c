"""A process that grows is warned of once it has settled, with who holds what; one that does not is left alone."""

import ctypes

import pyarrow as pa

from rollmill.flows.run.vitals import SETTLED_AFTER, WHAT_TO_LOOK_AT, MemoryWatch, Vitals
from rollmill.tasks.observe.process_memory import KINDS, MIB, Holders, own_rss_bytes

BLOCK_BYTES, N_BLOCKS = 64 * 1024, 2048
"""Blocks below the size from which allocators ask the system for each by itself."""

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]


def seen(rss_mib: list[float], max_growth: float = 0.25) -> list[str]:
    """Return the warnings about a process with the given memory at the ends of its steps."""
    said: list[str] = []
    at = [0]
    watch = MemoryWatch(
        max_growth, said.append, lambda: Holders(int(rss_mib[at[0]] * MIB), {}, {"Leaked": at[0]}, {})
    )
    for number, mib in enumerate(rss_mib):
        at[0] = number
        watch.record(int(mib * MIB))
    return said


def test_growth_is_measured_from_when_the_process_has_settled() -> None:
    assert not seen([100.0] + [300.0] * SETTLED_AFTER + [370.0])
    (said,) = seen([100.0] + [300.0] * SETTLED_AFTER + [380.0])
    assert "this process has grown from 300 to 380 MiB" in said
    assert "+2 Leaked" in said


def test_each_further_growth_is_reported_once() -> None:
    settled = [100.0] * SETTLED_AFTER
    assert len(seen([*settled, 130.0, 130.0, 135.0])) == 1
    assert len(seen([*settled, 130.0, 130.0, 170.0])) == 2


def test_no_bound_means_no_warning() -> None:
    assert not seen([100.0] * SETTLED_AFTER + [900.0], max_growth=0.0)


def below(steps: list[dict[tuple[str, int], float]], max_growth: float = 0.25) -> list[str]:
    """Return the warnings about processes with the given MiB, by kind and id, at the ends of steps."""
    said: list[str] = []
    watch = MemoryWatch(max_growth, said.append)
    for step in steps:
        watch.record_children({process: int(mib * MIB) for process, mib in step.items()})
    return said


def test_a_launched_process_that_grows_is_named_with_what_to_look_at() -> None:
    settled = [{("servers", 7): 1000.0, ("servers", 8): 1000.0, ("trainer", 9): 800.0}] * SETTLED_AFTER
    grown = {("servers", 7): 1300.0, ("servers", 8): 1200.0, ("trainer", 9): 800.0}
    (said,) = below([*settled, grown, grown])
    assert "process 7 (servers) has grown from 1,000 to 1,300 MiB" in said
    assert "rollout.max_in_flight" in said
    assert not below([*settled, grown], max_growth=0.0)


def test_a_launched_process_that_is_small_or_was_started_again_is_left_alone() -> None:
    assert not below([{("scoring", 7): 40.0}] * SETTLED_AFTER + [{("scoring", 7): 90.0}])
    assert not below([{("servers", 7): 500.0}] * SETTLED_AFTER + [{("servers", 8): 2000.0}] * 2)


def test_every_launched_kind_has_a_hint_what_to_look_at() -> None:
    assert WHAT_TO_LOOK_AT.keys() == set(KINDS.values())


async def test_a_step_has_the_metrics_of_loop_and_memory() -> None:
    vitals = Vitals(max_stall_ms=0.0, max_lag_p99_ms=0.0)  # a busy machine's lag is reported in a flow
    with vitals.watch():
        values = {metric.name: metric.value for metric in await vitals.measure_step()}
    assert values["memory/flow_rss_bytes"] > MIB
    assert {"memory/arrow_bytes", "memory/malloc_bytes", "memory/malloc_free_bytes"} <= values.keys()


async def test_what_was_freed_of_the_c_allocators_memory_goes_back_after_a_step() -> None:
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    used = own_rss_bytes()
    for block in blocks[:-1]:  # the last one keeps the heap's end in use
        libc.free(block)
    await Vitals().measure_step()
    assert used - own_rss_bytes() > 0.8 * N_BLOCKS * BLOCK_BYTES
    libc.free(blocks[-1])


async def test_what_was_freed_of_arrows_memory_goes_back_after_a_step() -> None:
    buffers = [pa.allocate_buffer(BLOCK_BYTES) for _ in range(N_BLOCKS)]
    for buffer in buffers:
        ctypes.memset(buffer.address, 1, BLOCK_BYTES)
    used = own_rss_bytes()
    del buffer
    buffers.clear()
    await Vitals().measure_step()
    assert used - own_rss_bytes() > 0.8 * N_BLOCKS * BLOCK_BYTES


async def test_a_growing_process_is_reported_with_what_waits() -> None:
    said: list[str] = []
    limits = {"max_rss_growth": 1e-6, "max_stall_ms": 0.0, "max_lag_p99_ms": 0.0}
    vitals = Vitals(said.append, lambda: {"spans": 12}, **limits)  # type: ignore[arg-type]
    for _ in range(SETTLED_AFTER):
        await vitals.measure_step()
    held = b"x" * (64 * MIB)
    await vitals.measure_step()
    text = next(each for each in said if each.startswith("this process"))
    assert "MiB in use by the C allocator" in text, held[:1]
    assert "queued 12 spans" in text


def test_without_a_watched_loop_no_lag_is_reported() -> None:
    assert not [metric for metric in Vitals()._loop.report() if metric.name.startswith("loop/lag")]
