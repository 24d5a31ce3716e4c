"""A process that grows is warned of once it has settled, with who holds what; one that does not is left alone."""

from flows.running.vitals import SETTLED_AFTER, MemoryWatch, Vitals
from tasks.observe.memory import MIB, Holders


def seen(rss_mib: list[float], max_growth: float = 0.25) -> list[str]:
    """What is said of a process that has so much at the ends of its steps."""
    said: list[str] = []
    at = [0]
    watch = MemoryWatch(max_growth, said.append, lambda: Holders(int(rss_mib[at[0]] * MIB), 0, 0, at[0]))
    for number, mib in enumerate(rss_mib):
        at[0] = number
        watch.see(int(mib * MIB))
    return said


def test_growth_is_measured_from_when_the_process_has_settled() -> None:
    assert not seen([100.0] + [300.0] * SETTLED_AFTER + [370.0])
    (said,) = seen([100.0] + [300.0] * SETTLED_AFTER + [380.0])
    assert "from 300 to 380 MiB" in said
    assert f"+{2} small Python blocks" in said


def test_each_further_growth_is_told_once() -> None:
    settled = [100.0] * SETTLED_AFTER
    assert len(seen([*settled, 130.0, 130.0, 135.0])) == 1
    assert len(seen([*settled, 130.0, 130.0, 170.0])) == 2


def test_no_bound_means_no_warning() -> None:
    assert not seen([100.0] * SETTLED_AFTER + [900.0], max_growth=0.0)


async def test_a_step_has_the_metrics_of_loop_and_memory() -> None:
    vitals = Vitals()
    with vitals.watching():
        values = {metric.name: metric.value for metric in await vitals.of_step()}
    assert values["memory/flow_rss_bytes"] > MIB
    assert {"memory/arrow_bytes", "memory/malloc_bytes", "memory/malloc_free_bytes"} <= values.keys()


def test_who_watches_nothing_reports_no_lag() -> None:
    assert not [metric for metric in Vitals()._loop.report() if metric.name.startswith("loop/lag")]
