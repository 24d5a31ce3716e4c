"""flow_runs.json: the flow runs that worked on a run and were not yet seen to have ended."""

from collections.abc import Sequence
from uuid import UUID

from pydantic import BaseModel, ValidationError

from tasks.store.filesystem import Files, files_of, publish_text, read_text
from tasks.store.layout import FLOW_RUNS, RunFolder

MAX_KEPT = 20
"""More than these are not of interest: the run was killed as often without its Prefect server being there."""


class _FlowRuns(BaseModel):
    flow_runs: list[UUID]


def read_flow_runs(folder: RunFolder) -> list[UUID]:
    """Their ids, oldest first; empty when there is no such file, or it is damaged: it serves the UI alone."""
    if not files_of(folder).keys(FLOW_RUNS):
        return []
    text = read_text(files_of(folder), FLOW_RUNS)
    try:
        return _FlowRuns.model_validate_json(text).flow_runs
    except ValidationError:
        return []


def write_flow_runs(files: Files, ids: Sequence[UUID]) -> None:
    """Replace them, by whoever holds the run's lock.

    Raises:
        LeaseLostError: another process has taken the run over.
        StoreError: they could not be written.
    """
    text = _FlowRuns(flow_runs=list(ids)[-MAX_KEPT:]).model_dump_json(indent=2).encode() + b"\n"
    publish_text(files, FLOW_RUNS, text)
