"""Versions of the data sets' schemas: which are read, and what rows of an older one lack."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa

from rollmill.tasks.errors import SchemaError
from rollmill.tasks.store.schemas import SCHEMA_VERSION, dataset_schema, schema_like

OLDEST_SCHEMA_VERSION = 2
"""Oldest version that is read; what its rows lack is filled with ADDED_COLUMNS."""

Value: TypeAlias = str | int | tuple[int, ...]

# Value, in every row of an older version, of each column that a version added.
_ADDED_TO_SAMPLED: Mapping[str, Value] = {
    "message_segments": (),
    "segment_starts": (0,),
    "segment_parents": (-1,),
    "segment_prefix_tokens": (0,),
    "segment_prefix_messages": (0,),
    "turn_starts": (),
    "turn_tokens": (),
    "turn_messages": (),
}
_ADDED_TO_SCORED: Mapping[str, Value] = {"turn_rewards": (), "token_rewards": ()}
_ADDED_IN: Mapping[int, Mapping[str, Mapping[str, Value]]] = {
    3: {
        "rollouts": _ADDED_TO_SAMPLED,
        "evaluations": _ADDED_TO_SAMPLED,
        "scores": _ADDED_TO_SCORED,
        "evaluation_scores": _ADDED_TO_SCORED,
        "batches": {"token_advantages": ()},
    },
    4: {"plans": {"problems": ()}},
    5: {"plans": {"source": "", "source_step": -1, "source_group": -1}},
}
ADDED_COLUMNS: Mapping[str, Mapping[str, Value]] = {
    dataset: {name: value for added in _ADDED_IN.values() for name, value in added.get(dataset, {}).items()}
    for dataset in {dataset: None for added in _ADDED_IN.values() for dataset in added}
}
"""By data set, the columns that a version after the oldest one added, each with its value in older rows."""


def stored_schema(dataset: str, stored: pa.Schema) -> pa.Schema:
    """Return the schema that a shard with the schema `stored` should have: that of its version. Errors as for `schema_like`."""
    whole, version = schema_like(dataset, stored), (stored.metadata or {}).get(b"schema_version", b"")
    older = int(version) if version.isdigit() else OLDEST_SCHEMA_VERSION
    later = [added[dataset] for number, added in _ADDED_IN.items() if number > older and dataset in added]
    if not later:
        return whole
    return pa.schema(
        [each for each in whole if not any(each.name in added for added in later)], whole.metadata
    )


def fill_added_columns(dataset: str, rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Return rows with the columns `names`; those that rows of an older version lack have the value of ADDED_COLUMNS."""
    for name in names:
        if name not in rows.column_names:
            field, value = dataset_schema(dataset).field(name), ADDED_COLUMNS[dataset][name]
            rows = rows.append_column(field, pa.array([value] * rows.num_rows, field.type))
    return rows.select(names)


def check_version(schema: pa.Schema) -> None:
    """Raise SchemaError for the schema of a shard that another schema version wrote, or that records none."""
    version = (schema.metadata or {}).get(b"schema_version", b"").decode()
    if not version.isdecimal():
        raise SchemaError("its schema has no schema_version; Rollmill did not write it")
    if fault := describe_unread(int(version)):
        raise SchemaError(f"it has {fault}")


def describe_unread(version: int) -> str:
    """Return why this Rollmill does not read a schema version, and which one does; empty if it reads it."""
    if OLDEST_SCHEMA_VERSION <= version <= SCHEMA_VERSION:
        return ""
    which = "a newer" if version > SCHEMA_VERSION else "an older"
    read = f"{OLDEST_SCHEMA_VERSION} to {SCHEMA_VERSION}"
    return f"schema version {version}, and this Rollmill reads {read}; use {which} one"
