"""What the trainer's answers say: errors under their own types, and what its ranks did."""

import time
from collections.abc import Mapping
from typing import Any

import httpx

from tasks import errors
from tasks.errors import RequestError
from tasks.observe.clocks import keep, shifted
from tasks.observe.spans import Span
from tasks.sync.order import FIRST_RANK
from tasks.train.rank_spans import IDLE, starts_of

_NAMED_ERRORS = (
    "BatchRefusedError",
    "StoreError",
    "LeaseLostError",
    "SchemaError",
    "ShardError",
    "SyncError",
)


def keep_spans(state: Mapping[str, Any], asked_ns: int, starts: dict[str, int] | None = None) -> None:
    """What the ranks did for an operation that is done; rank 0 was idle before, and at work since it was asked.

    Args:
        state: of the operation.
        asked_ns: when it was asked for, by our clock, in nanoseconds since 1970.
        starts: gets when each rank began with it, by the rank's process, likewise.
    """
    spans = [Span(*each) for each in state.get("spans", ())]
    of_command = [each for each in spans if each.process == FIRST_RANK and each.name != IDLE]
    kept = shifted(spans, asked_ns, time.time_ns(), of_command)
    keep(kept)
    if starts is not None:
        starts |= starts_of(kept)


def error_of(command: str, error_type: str, text: str) -> Exception:
    """The trainer's error in our process, under its own type where a caller would treat it differently."""
    if error_type in _NAMED_ERRORS:
        kind: type[Exception] = getattr(errors, error_type)
        return kind(text)
    return RequestError(f"trainer: {command}: {text}")


def detail_of(response: httpx.Response) -> str:
    """What an answer says of why the trainer refused a request."""
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return response.text
