"""flow_runs.json: ids of the flow runs that worked on a run and are not known to have ended."""

from collections.abc import Sequence
from uuid import UUID

from pydantic import BaseModel, ValidationError

from rollmill.tasks.store.filesystem import Files, open_files, publish_text, read_text
from rollmill.tasks.store.folders import FLOW_RUNS, RunFolder

# Most ids that are kept: more would mean so many kills in a row without a Prefect server.
MAX_KEPT = 20


class _FlowRuns(BaseModel):
    flow_runs: list[UUID]


def read_flow_runs(folder: RunFolder) -> list[UUID]:
    """Read the ids of the recorded flow runs, oldest first; empty if the file, which only the UI needs, is missing or damaged."""
    if not open_files(folder).keys(FLOW_RUNS):
        return []
    text = read_text(open_files(folder), FLOW_RUNS)
    try:
        return _FlowRuns.model_validate_json(text).flow_runs
    except ValidationError:
        return []


def write_flow_runs(files: Files, ids: Sequence[UUID]) -> None:
    """Replace the recorded ids of flow runs by at most the last 20; called by the holder of the run's lock.

    Raises:
        LeaseLostError: another process has taken the run over.
        StoreError: they could not be written.
    """
    text = _FlowRuns(flow_runs=list(ids)[-MAX_KEPT:]).model_dump_json(indent=2).encode() + b"\n"
    publish_text(files, FLOW_RUNS, text)
