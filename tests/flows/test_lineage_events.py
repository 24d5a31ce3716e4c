"""OpenLineage events of a run: sent in the background, and whatever the receiver does, the run is the same."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
from json_receiver import JsonReceiver, receive_json

from rollmill.flows.run import lineage_events
from rollmill.flows.run.lineage_events import send_lineage_events
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import Manifest, TrainingSource
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import SCHEMA_VERSION

# What version 2-0-2 of the specification requires of a RunEvent.
FACET = {"type": "object", "required": ["_producer", "_schemaURL"]}
DATASET = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}},
}
RUN_EVENT = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job", "eventType"],
    "properties": {
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": {"type": "string", "format": "uri"},
        "schemaURL": {"type": "string", "format": "uri"},
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "run": {
            "required": ["runId"],
            "properties": {
                "runId": {"type": "string", "format": "uuid"},
                "facets": {"additionalProperties": FACET},
            },
        },
        "job": DATASET,
        "inputs": {"type": "array", "items": DATASET},
        "outputs": {"type": "array", "items": DATASET},
    },
}
SOURCES = (TrainingSource("b", "s3://bucket/runs/source"),)
MANIFEST = Manifest(
    "a", 1, 1, SCHEMA_VERSION, {}, {"rollmill": "0.1"}, "c0ffee", "", "running", sources=SOURCES
)
STORE = cast(OpenRun, SimpleNamespace(manifest=MANIFEST, folder=RunFolder("runs/new")))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[JsonReceiver]:
    # A busy machine may answer late.
    monkeypatch.setattr(lineage_events, "TIMEOUT_S", 60.0)
    monkeypatch.setattr(lineage_events, "END_TIMEOUT_S", 60.0)
    with receive_json() as server:
        monkeypatch.setenv("OPENLINEAGE_URL", f"{server.url}/")
        yield server


async def run_with_events(error: BaseException | None = None) -> list[str]:
    """A run that ends with this error; returns its warnings."""
    warnings: list[str] = []
    async with send_lineage_events(STORE, Path("models/start"), warnings.append):
        if error is not None:
            raise error
    return warnings


def kinds(receiver: JsonReceiver) -> list[str]:
    return [event["eventType"] for _, _, event in receiver.received]


async def test_a_run_sends_its_start_and_its_end_with_what_it_reads_and_writes(
    receiver: JsonReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "a key")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "team")
    await run_with_events()
    assert kinds(receiver) == ["START", "COMPLETE"]
    for path, headers, event in receiver.received:
        assert path == "/api/v1/lineage"
        assert headers["Authorization"] == "Bearer a key"
        jsonschema.validate(event, RUN_EVENT, format_checker=jsonschema.FormatChecker())
        assert event["job"] == {"namespace": "team", "name": "new"}
        assert event["inputs"] == [
            {"namespace": "file", "name": RunFolder("models/start").absolute},
            {"namespace": "s3://bucket", "name": "runs/source"},
        ]
        assert event["outputs"] == [{"namespace": "file", "name": RunFolder("runs/new").absolute}]
    ids = {event["run"]["runId"] for _, _, event in receiver.received}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("it broke"), "FAIL"), (asyncio.CancelledError(), "ABORT")]
)
async def test_a_run_that_fails_or_is_cancelled_ends_as_such(
    receiver: JsonReceiver, error: BaseException, kind: str
) -> None:
    with pytest.raises(type(error)):
        await run_with_events(error)
    assert kinds(receiver) == ["START", kind]
    message: dict[str, Any] = receiver.received[-1][2]["run"]["facets"]["errorMessage"]
    assert message["message"] in ("it broke", "CancelledError")


@pytest.mark.parametrize("status", [400, 500])
async def test_a_receiver_that_refuses_is_reported_once(receiver: JsonReceiver, status: int) -> None:
    receiver.status = status
    (warning,) = await run_with_events()
    assert "OpenLineage events were not sent" in warning
    assert str(status) in warning
    assert len(receiver.received) == 2


async def test_a_receiver_that_is_not_there_or_does_not_answer_fails_no_run(
    receiver: JsonReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage_events, "END_TIMEOUT_S", 0.1)
    receiver.may_answer.clear()
    assert await run_with_events() == []
    monkeypatch.setattr(lineage_events, "END_TIMEOUT_S", 60.0)
    for url in (f"http://127.0.0.1:{free_port()}", "no address", "http://[", "file:///etc"):
        monkeypatch.setenv("OPENLINEAGE_URL", url)
        assert len(await run_with_events()) == 1, url


@pytest.mark.parametrize("name", ["OPENLINEAGE_URL", "OPENLINEAGE_DISABLED"])
async def test_without_an_address_or_switched_off_nothing_is_sent(
    receiver: JsonReceiver, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "true" if name.endswith("DISABLED") else "")
    await run_with_events()
    assert receiver.received == []
