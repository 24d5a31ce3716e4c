"""`rollmill spans`: where the time went, of a run whose every second is known."""

import json
import shutil
import sys
from collections.abc import Callable

import pytest
from otlp_receiver import Receiver
from span_rows import BEGAN, Row, whole_step
from stored_spans import store_spans

from rollmill.flows.prefect_integration import run_pages
from rollmill.flows.prefect_integration.run_pages import StepPage, run_page
from rollmill.tasks.store.folders import RunFolder

Command = Callable[..., str]
RUN = "5eed5eed5eed5eed"


def test_the_table_has_every_owner_and_says_what_would_shorten_a_step(
    rollmill: Command, timed_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = rollmill("spans", timed_run.location)
    assert max(map(len, said.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "timed, mean of 3 steps: 10.00 s (median 10.00 s), by what decided it" in lines
    assert "collect generating 3.500 35.0" in lines
    assert "train forward 2.300 23.0" in lines
    assert "2 ranks waiting_for_rank trainer/1 0.750 7.5 1.500 1.500" in lines
    assert "busiest rank: trainer/1, 2.60 s of a step, 1.40 s more than the least busy" in lines
    assert "another server 2.500" in lines
    assert "generation takes 2.6 times as long as training" in said


def test_the_table_has_a_runs_start_and_end_also_without_a_step(
    rollmill: Command, timed_run: RunFolder
) -> None:
    start: list[Row] = [(0, "flow", "main", "start", -10, 0), (0, "flow", "main", "launching", -10, -1)]
    store_spans(timed_run, RUN, *start)
    said = rollmill("spans", timed_run.location)
    assert "timed, mean of 3 steps" in said
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert lines[-2:] == ["start launching 9.000 90.0", "start unattributed 1.000 10.0"]
    assert "launching" not in rollmill("spans", timed_run.location, "--step", "0")
    for step in range(3):
        shutil.rmtree(timed_run.local / "spans" / f"step={step:06d}")
    store_spans(timed_run, RUN, *start)
    only = rollmill("spans", timed_run.location)
    assert only.startswith("timed, its start and end, outside of its steps")


def test_one_steps_table_lists_its_critical_path(rollmill: Command, timed_run: RunFolder) -> None:
    lines = [
        " ".join(line.split()) for line in rollmill("spans", timed_run.location, "--step", "1").splitlines()
    ]
    assert "timed, step 1: 10.00 s, by what decided it" in lines
    assert "6.200 2.300 train forward trainer/1 main" in lines


def test_a_steps_page_in_prefect_has_the_table(timed_run: RunFolder) -> None:
    page = StepPage(timed_run, 1, "").time()
    assert "| collect | generating | 3.500 | 35.0 |" in page
    assert r"| 2 ranks | waiting\_for\_rank | trainer\/1 | 0.750 | 7.5 |" in page


def test_a_step_that_is_not_over_counts_for_no_mean(rollmill: Command, timed_run: RunFolder) -> None:
    store_spans(timed_run, RUN, (3, "flow", "step", "collect", 30, 31))
    said = rollmill("spans", timed_run.location)
    assert "timed, mean of 3 steps: 10.00 s" in said
    assert "timed, step 3: 1.00 s" in rollmill("spans", timed_run.location, "--step", "3")


def test_the_runs_page_has_the_mean_of_its_last_steps(
    timed_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        "**timed\\, mean of 3 steps\\: 10\\.00 s \\(median 10\\.00 s\\)\\, by what decided it**"
        in run_page(timed_run, b"png")
    )
    monkeypatch.setattr(run_pages, "TIMED_STEPS", 2)
    assert "**timed\\, its last steps\\, mean of 2 steps" in run_page(timed_run, b"png")


def test_json_has_every_step_and_owner_and_the_whole_path(rollmill: Command, timed_run: RunFolder) -> None:
    values = json.loads(rollmill("spans", timed_run.location, "--json"))
    assert [each["seconds"] for each in values["steps"]] == [10.0] * 3
    assert sum(each["seconds"] for each in values["critical_path"]) == pytest.approx(30.0)
    assert sum(each["share"] for each in values["line"]) == pytest.approx(1.0)
    assert values["balance"]["ratio"] == pytest.approx(5.0 / 1.9)


def test_a_run_from_before_spans_says_so(rollmill: Command) -> None:
    assert "it has no stored spans" in rollmill("spans", "small")


def test_a_step_that_is_not_there_names_those_that_are(rollmill: Command, timed_run: RunFolder) -> None:
    assert "it has spans of steps 0 to 2" in rollmill("spans", timed_run.location, "--step", "7")


def test_spans_that_are_sent_are_not_printed_as_json_too(
    rollmill: Command, timed_run: RunFolder, receiver: Receiver
) -> None:
    refused = rollmill("spans", timed_run.location, "--json", "--otlp", receiver.url)
    assert "--json" in refused
    assert receiver.requests == []


def test_an_opentelemetry_receiver_gets_a_trace_for_each_step_with_all_below_the_steps_span(
    rollmill: Command, timed_run: RunFolder, receiver: Receiver
) -> None:
    n = 2 * len(whole_step())
    assert rollmill("spans", timed_run.location, "--step", "0:1", "--otlp", receiver.url) == (
        f"{n} spans sent to {receiver.url}\n"
    )
    ((path, request),) = receiver.requests
    assert path == "/v1/traces"
    of_process = {
        next(
            each.value.string_value for each in spans.resource.attributes if each.key == "service.instance.id"
        ): [span for scope in spans.scope_spans for span in scope.spans]
        for spans in request.resource_spans
    }
    sent = [span for spans in of_process.values() for span in spans]
    assert set(of_process) == {"flow", "http://10.0.0.1:8000", "trainer/0", "trainer/1"}
    assert len({span.span_id for span in sent}) == n
    assert len({span.trace_id for span in sent}) == 2
    roots = {span.trace_id: span for span in sent if not span.parent_span_id}
    assert [span.name for span in roots.values()] == ["step", "step"]
    late = next(span for span in of_process["flow"] if span.name == "waiting_for_stragglers")
    assert next(span.name for span in sent if span.span_id == late.parent_span_id) == "collect"
    assert (late.start_time_unix_nano / 1e9, late.end_time_unix_nano / 1e9) == pytest.approx(
        (BEGAN.timestamp() + 4, BEGAN.timestamp() + 6)
    )


def test_each_attempt_at_a_step_has_a_span_around_it_and_a_batch_that_is_applied_again_is_none(
    rollmill: Command, timed_run: RunFolder, receiver: Receiver
) -> None:
    killed: list[Row] = [(3, "flow", "step", "collect", 30, 32), (3, "flow", "9.0", "generating", 31, 32)]
    again: list[Row] = [(3, "flow", "main", "start", 40, 42), (2, "trainer/0", "main", "forward", 41, 42)]
    store_spans(timed_run, RUN, *killed, *again, *whole_step(3, began=42))
    rollmill("spans", timed_run.location, "--otlp", receiver.url)
    ids = {(span.trace_id, span.span_id) for span in receiver.spans}
    assert len(ids) == len(receiver.spans)
    assert all((each.trace_id, each.parent_span_id) in ids for each in receiver.spans if each.parent_span_id)
    roots = [each for each in receiver.spans if not each.parent_span_id]
    assert {each.name for each in roots} == {"step"}
    seconds = [(each.start_time_unix_nano / 1e9 - BEGAN.timestamp(), each.trace_id) for each in roots]
    assert sorted(round(start) for start, _ in seconds) == [0, 10, 20, 30, 42]
    assert len({trace for _, trace in seconds}) == 4


def test_spans_that_are_sent_twice_have_the_same_ids(
    rollmill: Command, timed_run: RunFolder, receiver: Receiver
) -> None:
    for _ in range(2):
        rollmill("spans", timed_run.location, "--otlp", receiver.url)
    first, second = (request for _, request in receiver.requests)
    assert first == second


def test_a_receiver_that_refuses_spans_is_named(
    rollmill: Command, timed_run: RunFolder, receiver: Receiver
) -> None:
    receiver.status = 400
    said = rollmill("spans", timed_run.location, "--otlp", receiver.url)
    assert f"{receiver.url}/v1/traces did not accept the spans" in said


def test_an_address_with_a_password_is_not_sent_to_and_not_shown(
    rollmill: Command, timed_run: RunFolder
) -> None:
    said = rollmill("spans", timed_run.location, "--otlp", "http://me:planted@127.0.0.1:1")
    assert "may hold no user name, password or key" in said
    assert "planted" not in said


def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(
    rollmill: Command, timed_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    said = rollmill("spans", timed_run.location, "--otlp", "http://127.0.0.1:4318")
    assert "pip install 'rollmill[otel]'" in said
