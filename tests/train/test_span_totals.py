"""Spans of a command of many ranks: few rows, and the same seconds of each name."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.tasks.look.ledger.span_timeline import build_timeline
from rollmill.tasks.observe.spans import Span
from rollmill.tasks.store.span_rows import rows_by_step
from rollmill.tasks.train.collectives import RankWaits, find_waits
from rollmill.tasks.train.service.rank_spans import command_starts, rank_process, spans_since_idle
from rollmill.tasks.train.service.rank_timeline import exclusive_seconds, rank_metrics
from rollmill.tasks.train.service.span_totals import OTHER_RANKS, SINGLE_WAITS, limit_spans

MS = 1_000_000
LAYERS, MICRO_BATCHES = 64, 20
PASSES = {"packing": 1, "forward": LAYERS, "backward": 2 * LAYERS, "measuring": 1}
"""Collectives in each phase of a micro-batch."""

Recorded = tuple[list[list[Span]], list[RankWaits]]


def simulate_step(n_ranks: int, seed: int = 0, *, micro_batches: int = MICRO_BATCHES) -> Recorded:
    """Spans and waits of a step under ZeRO-3, whose ranks come up to 1 ms too late to each collective.

    Each rank is idle for 1 s and waits 2 ms for the command. The work before a collective takes 2 ms.
    """
    generator = np.random.default_rng(seed)
    own = [
        [
            Span(rank_process(rank), "main", "idle", 3, MS, 1000 * MS, "no command"),
            Span(rank_process(rank), "main", "waiting_for_rank", 3, 1001 * MS, 2 * MS, "trainer/0"),
        ]
        for rank in range(n_ranks)
    ]
    visits, time = [], 1003 * MS
    for name, n_collectives in [*PASSES.items()] * micro_batches:
        began = time
        for _ in range(n_collectives):
            came = time + 2 * MS + generator.integers(0, MS, n_ranks)
            time = int(came.max()) + MS // 10
            visits.append(np.stack([came, np.full(n_ranks, time)], 1))
        for rank, spans in enumerate(own):
            spans.append(Span(rank_process(rank), "main", name, 3, began, time - began))
            # A part of a phase, without a collective.
            spans.append(Span(rank_process(rank), "main", "recomputing", 3, began + MS // 5, MS // 2))
    return own, find_waits(list(np.stack(visits, 1)))


def owned(spans: Sequence[Span]) -> Counter[tuple[str, str]]:
    """Microseconds of each rank by name, as `rollmill spans` adds them up."""
    (rows,) = rows_by_step("r", spans, 3).values()
    timeline = build_timeline(pl.DataFrame(rows))
    names = timeline.spans["name"].to_list()
    found = Counter[tuple[str, str]]()
    for lane, span, start, end in zip(
        *(each.tolist() for each in (timeline.pieces.lane, timeline.pieces.span)),
        *(each.tolist() for each in (timeline.pieces.start, timeline.pieces.end)),
        strict=True,
    ):
        found[timeline.lanes[lane][0], names[span]] += end - start
    return found


def test_a_step_of_512_ranks_has_fewer_than_10_000_spans() -> None:
    own, waits = simulate_step(512)
    assert sum(len(each.started_ns) for each in waits) > 1_500_000
    assert len(limit_spans(own, waits)) < 10_000


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.integers(0, 200))
def test_merged_spans_own_the_same_time_by_rank_and_name(n_ranks: int, seed: int, limit: int) -> None:
    own, waits = simulate_step(n_ranks, seed, micro_batches=2)
    single, merged = limit_spans(own, waits, 1 << 30), limit_spans(own, waits, limit)
    expected, found = owned(single), owned(merged)
    assert found.keys() == expected.keys()
    # Rows have whole microseconds.
    assert all(abs(found[key] - expected[key]) <= len(single) for key in expected)
    for rank in range(n_ranks):
        before, after = (
            exclusive_seconds([each for each in spans if each.process == rank_process(rank)])
            for spans in (single, merged)
        )
        assert after == pytest.approx(before, abs=1e-9)


def test_merged_waits_have_the_sum_by_the_slowest_rank() -> None:
    own, waits = simulate_step(3, micro_batches=8)
    single = [each for each in limit_spans(own, waits, 1 << 30) if each.process == "trainer/1"]
    merged = [each for each in limit_spans(own, waits, 1500) if each.process == "trainer/1"]
    for cause in ("trainer/0", "trainer/2"):
        before, after = (
            [each for each in spans if each.name == "waiting_for_rank" and each.cause == cause]
            for spans in (single, merged)
        )
        assert len(after) < len(before)
        assert sum(each.duration_ns for each in after) == sum(each.duration_ns for each in before)


def test_the_longest_waits_stay_where_they_were() -> None:
    own, waits = simulate_step(16, micro_batches=4)
    every = [
        each
        for each in limit_spans(own, waits, 1 << 30)
        if each.name == "waiting_for_rank" and each.started_ns > 1003 * MS
    ]
    longest = sorted(every, key=lambda each: -each.duration_ns)[:SINGLE_WAITS]
    merged = limit_spans(own, waits, 2000)
    assert set(longest) <= set(merged)
    assert sum(map(len, own)) + len(every) > 3 * len(merged)


def test_waits_for_too_many_ranks_have_one_cause_for_the_rest() -> None:
    own, waits = simulate_step(16, micro_batches=4)
    single, merged = limit_spans(own, waits, 1 << 30), limit_spans(own, waits, 1)
    new = {*merged} - {*single}
    assert {each.cause for each in new if each.name == "waiting_for_rank"} == {OTHER_RANKS}


def test_starts_and_metrics_of_a_step_are_those_of_its_single_spans() -> None:
    own, waits = simulate_step(4, micro_batches=3)
    metrics, starts = [], []
    for limit in (1 << 30, 10):
        spans = limit_spans(own, waits, limit)
        starts.append(command_starts(spans))
        of_ranks = [[each for each in spans if each.process == rank_process(rank)] for rank in range(4)]
        metrics.append({name: value.total for name, value in rank_metrics(of_ranks)})
    assert starts[0] == starts[1]
    assert metrics[0] == pytest.approx(metrics[1])


def test_spans_of_the_command_before_are_not_those_of_the_last_one() -> None:
    work = [
        ("loading", 0, 5),
        ("idle", 5, 6),
        ("waiting_for_rank", 6, 7),
        ("forward", 7, 9),
        ("forward", 9, 10),
    ]
    own = [[Span("trainer/0", "main", name, 1, start * MS, (end - start) * MS) for name, start, end in work]]
    none = np.empty(0, np.int64)
    merged = limit_spans(own, [RankWaits(none, none, none)], 0)
    assert [each.name for each in merged] == ["loading", "idle", "waiting_for_rank", "forward"]
    assert [(each.name, each.duration_ns) for each in spans_since_idle(merged)] == [
        ("waiting_for_rank", MS),
        ("forward", 3 * MS),
    ]


def test_spans_in_the_open_span_around_the_exchange_stay_after_those_that_have_ended() -> None:
    own = [[Span("trainer/0", "main", "forward", 0, 0, 10 * MS)]]
    started = np.array([*range(150), 240, 260, 280]) * (MS // 20)
    waits = [RankWaits(started, started + MS // 50, np.ones(153, np.int64))]
    forward, before, after = limit_spans(own, waits, 0)
    assert (forward.name, forward.started_ns, forward.duration_ns) == ("forward", 0, 7 * MS)
    assert (before.started_ns, before.duration_ns) == (7 * MS, 3 * MS)
    assert (after.started_ns, after.duration_ns) == (12 * MS, 3 * MS // 50)
