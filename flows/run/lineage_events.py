"""Events of a run's start and end for an OpenLineage receiver, sent in the background: they never fail or delay a run."""

import asyncio
import os
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import error_text
from rollmill.tasks.store.folders import S3_SCHEME
from rollmill.tasks.store.run.manifest import Manifest
from rollmill.tasks.store.run.writable_run import OpenRun

# The variables of every OpenLineage client.
URL_ENV, ENDPOINT_ENV, KEY_ENV = "OPENLINEAGE_URL", "OPENLINEAGE_ENDPOINT", "OPENLINEAGE_API_KEY"
NAMESPACE_ENV, DISABLED_ENV = "OPENLINEAGE_NAMESPACE", "OPENLINEAGE_DISABLED"
ENDPOINT = "api/v1/lineage"
SCHEMA = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACET = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunFacet"
ERROR_FACET = "https://openlineage.io/spec/facets/1-0-0/ErrorMessageRunFacet.json"
PRODUCER = "urn:rollmill"
# Seconds for one request, and those that the end of a run waits at most for its last event.
TIMEOUT_S, END_TIMEOUT_S = 5.0, 2.0


@asynccontextmanager
async def send_lineage_events(
    store: OpenRun, model: Path, warn: Callable[[str], None] = say
) -> AsyncIterator[None]:
    """Send an event at the start of the block, and one at its end that says how it ended, if OPENLINEAGE_URL is set.

    Args:
        store: the open run.
        model: folder of its start model, an input as its source runs are.
        warn: prints a warning.
    """
    url = os.environ.get(URL_ENV, "")
    if not url or os.environ.get(DISABLED_ENV, "").lower() in ("true", "1"):
        yield
        return
    address = f"{url.rstrip('/')}/{os.environ.get(ENDPOINT_ENV, ENDPOINT).lstrip('/')}"
    sender, execution = _Sender(address), str(uuid.uuid4())

    def send(kind: str, error: BaseException | None = None) -> None:
        # The sources of a new run are recorded after its start.
        sender.events.put(make_event(kind, execution, store.manifest, store.folder.absolute, model, error))

    send("START")
    try:
        yield
    except BaseException as error:
        send("ABORT" if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) else "FAIL", error)
        raise
    else:
        send("COMPLETE")
    finally:
        sender.events.put(None)
        await asyncio.to_thread(sender.join, END_TIMEOUT_S)
        if sender.failure:
            warn(f"OpenLineage events were not sent to {address}: {sender.failure}")


def make_event(
    kind: str,
    execution: str,
    manifest: Manifest,
    folder: str,
    model: Path,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """Return a RunEvent of OpenLineage's schema 2-0-2.

    Args:
        kind: START, COMPLETE, FAIL or ABORT.
        execution: UUID of this start of the run; a run that is resumed has another one.
        manifest: of the run.
        folder: absolute location of the run, the output.
        model: folder of the start model.
        error: what ended it.
    """
    facets: dict[str, Any] = {
        "rollmill": {
            "_producer": PRODUCER,
            "_schemaURL": FACET,
            "run": manifest.run,
            "incarnation": manifest.incarnation,
            "gitCommit": manifest.git_commit,
            "versions": manifest.versions,
        }
    }
    if error is not None:
        facets["errorMessage"] = {
            "_producer": PRODUCER,
            "_schemaURL": ERROR_FACET,
            "message": error_text(error) or type(error).__name__,
            "programmingLanguage": "python",
        }
    inputs = [str(model.absolute()), *(each.folder for each in manifest.sources)]
    namespace = os.environ.get(NAMESPACE_ENV, "rollmill")
    return {
        "eventType": kind,
        "eventTime": datetime.now(UTC).isoformat(),
        "producer": PRODUCER,
        "schemaURL": SCHEMA,
        "run": {"runId": execution, "facets": facets},
        "job": {"namespace": namespace, "name": folder.rpartition("/")[2]},
        "inputs": [_name_dataset(each) for each in inputs],
        "outputs": [_name_dataset(folder)],
    }


def _name_dataset(location: str) -> dict[str, str]:
    """Name a folder as OpenLineage does: the bucket and the key in it, or file and the path."""
    if not location.startswith(S3_SCHEME):
        return {"namespace": "file", "name": location}
    bucket, _, key = location.removeprefix(S3_SCHEME).partition("/")
    return {"namespace": f"{S3_SCHEME}{bucket}", "name": key}


class _Sender(threading.Thread):
    """Sends events in their order, until None; `failure` is the first one. A thread that hangs does not keep the process."""

    def __init__(self, address: str) -> None:
        super().__init__(name="lineage-events", daemon=True)
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._address, self.failure = address, ""
        self.start()

    def run(self) -> None:
        key = os.environ.get(KEY_ENV, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while (event := self.events.get()) is not None:
            try:
                response = httpx.post(self._address, json=event, headers=headers, timeout=TIMEOUT_S)
                response.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                self.failure = self.failure or error_text(error)
