"""`observe.otlp_endpoint`: a receiver, which may be slow or gone, gets a run's spans while it runs."""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from otlp_receiver import Receiver
from span_rows import BEGAN, whole_step
from stored_spans import store_spans

from rollmill.flows.run.run_sinks import open_span_sink
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.sinks.sink_check import check_sinks
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest

RUN = "5eed5eed5eed5eed"
PATIENCE_S = 60.0


@pytest.fixture
def run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """One that has stored no spans yet."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(small_run.local, folder.local)
    return folder


def store_of(folder: RunFolder) -> Any:
    """What is seen of an open run."""
    spans = SimpleNamespace(on_stored=lambda step: None)
    return SimpleNamespace(folder=folder, manifest=read_manifest(folder), spans=spans)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - the receiver is another thread's
            await asyncio.sleep(0.02)


async def test_each_step_is_sent_during_the_run_late_spans_with_the_next_step_and_none_twice(
    run: RunFolder, receiver: Receiver
) -> None:
    store, n = store_of(run), len(whole_step())
    async with open_span_sink(ObserveConfig(otlp_endpoint=receiver.url), store):
        store_spans(run, RUN, *whole_step(0))
        store.spans.on_stored(0)
        await until(lambda: len(receiver.spans) == n)
        late = (0, "flow", "checkpoint", "storing", 9, 12)
        store_spans(run, RUN, late, *whole_step(1, began=10))
        store.spans.on_stored(1)
        await until(lambda: len(receiver.spans) == 2 * n + 1)
        store_spans(run, RUN, (1, "flow", "main", "end", 20, 22))
    ids = [each.span_id for each in receiver.spans]
    assert len(ids) == len(set(ids)) == 2 * n + 2
    sent = {each.name: each for each in receiver.spans}
    traces = {each.trace_id for each in receiver.spans if each.name == "step"}
    assert len(traces) == 2
    assert sent["end"].trace_id in traces
    outer = next(each for each in receiver.spans if each.span_id == sent["storing"].parent_span_id)
    assert outer.name == "step"


async def test_a_step_whose_process_was_killed_gets_the_span_around_it_from_the_next_process(
    run: RunFolder, receiver: Receiver
) -> None:
    store = store_of(run)
    store_spans(run, RUN, (0, "flow", "step", "collect", 0, 2), (0, "flow", "7.0", "generating", 1, 2))
    async with open_span_sink(ObserveConfig(otlp_endpoint=receiver.url), store):
        store_spans(run, RUN, (1, "flow", "main", "start", 5, 10), *whole_step(1, began=10))
        store.spans.on_stored(1)
        await until(lambda: bool(receiver.spans))
    sent = {
        each.name: each for each in receiver.spans if each.start_time_unix_nano / 1e9 < BEGAN.timestamp() + 3
    }
    assert sent.keys() == {"step", "collect", "generating"}
    assert {sent[name].parent_span_id for name in ("collect", "generating")} == {sent["step"].span_id}


async def test_an_open_step_has_no_span_before_it_ends(run: RunFolder, receiver: Receiver) -> None:
    store = store_of(run)
    async with open_span_sink(ObserveConfig(otlp_endpoint=receiver.url), store):
        store_spans(run, RUN, (0, "flow", "main", "start", -5, 0), (0, "flow", "step", "collect", 0, 2))
        store.spans.on_stored(0)
        await until(lambda: bool(receiver.spans))
        (named,) = {each.parent_span_id for each in receiver.spans}
        store_spans(run, RUN, (0, "flow", "step", "step", 0, 3))
    (root,) = (each for each in receiver.spans if each.name == "step")
    assert (root.span_id, root.parent_span_id) == (named, b"")


async def test_a_receiver_that_is_down_is_reported_once_and_gets_all_spans_when_it_is_back(
    run: RunFolder, receiver: Receiver
) -> None:
    store, n, said = store_of(run), len(whole_step()), list[str]()
    receiver.status = 400
    config = ObserveConfig(otlp_endpoint=receiver.url)
    async with open_span_sink(config, store, said.append):
        for step in range(2):
            store_spans(run, RUN, *whole_step(step, began=10.0 * step))
            store.spans.on_stored(step)
            await until(lambda n_before=step: len(receiver.requests) > n_before)
        receiver.status = 200
        store_spans(run, RUN, *whole_step(2, began=20))
        store.spans.on_stored(2)
        await until(lambda: len({each.span_id for each in receiver.spans}) == 3 * n)
    (warning,) = said
    assert warning.startswith("OpenTelemetry: ")
    assert "rollmill spans RUN --otlp" in warning


async def test_a_receiver_that_never_answers_holds_the_end_for_the_time_set_and_nothing_before(
    run: RunFolder,
) -> None:
    store = store_of(run)
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(2 * PATIENCE_S), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    store_spans(run, RUN, *whole_step(0))
    waited_s = 1.0
    async with silent:
        async with open_span_sink(ObserveConfig(otlp_endpoint=url), store, list[str]().append, waited_s):
            for _ in range(1000):
                store.spans.on_stored(0)
            left = time.perf_counter()
        assert time.perf_counter() - left < PATIENCE_S / 2


def test_an_address_that_nothing_can_be_sent_to_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"observe.otlp_endpoint.*http://127.0.0.1:4318"):
        check_sinks(ObserveConfig(otlp_endpoint="localhost:4318"))
