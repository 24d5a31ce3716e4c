"""What is kept of the state that the `verifiers` library holds for a rollout: pure functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.errors import ConfigError, SchemaError
from tasks.store.states import check_columns

FIELD = "rollout.keep_states"
TEXT = "string"


def kept_states(names: Sequence[str]) -> Mapping[str, str]:
    """The type of each column to keep.

    Example: ("rung_up:int64", "history") is {"rung_up": "int64", "history": "string"}.

    Raises:
        ConfigError: a name cannot be a column's, or there is no such type.
    """
    columns = {name: kind or TEXT for name, _, kind in (each.partition(":") for each in names)}
    try:
        check_columns(columns)
    except SchemaError as error:
        raise ConfigError(FIELD, tuple(names), str(error)) from error
    return columns


def state_values(trace: Any, columns: Mapping[str, str]) -> Mapping[str, object]:
    """The columns' values, from a trace's state or else its info; what is no text is JSON in a column of texts."""
    if trace is None or not columns:
        return {}
    state = trace.state.model_dump(mode="json", include=set(columns))
    known = {name: trace.info[name] for name in columns if name in trace.info} | state
    return {name: _fitting(value, columns[name]) for name, value in known.items()}


def _fitting(value: object, kind: str) -> object:
    return value if kind != TEXT or value is None or isinstance(value, str) else json.dumps(value)
