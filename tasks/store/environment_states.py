"""Rows of the data set `states`: values that an environment keeps of each episode, in columns that it declares."""

import re
from collections.abc import Collection, Mapping
from numbers import Integral, Real

import numpy as np
import pyarrow as pa

from rollmill.tasks.errors import RunMismatchError, SchemaError, printable
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_pattern
from rollmill.tasks.store.reader import read_shard_schema
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.schemas import STATE_FIELDS, states_schema

# Column types by their Arrow names.
TYPES: Mapping[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.large_string(),
    "list<bool>": pa.large_list(pa.bool_()),
    "list<int64>": pa.large_list(pa.int64()),
    "list<float64>": pa.large_list(pa.float64()),
    "list<string>": pa.large_list(pa.large_string()),
}
# Python types that fit each column type; a bool is not a number.
_VALUES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool, np.bool_),
    "int64": (Integral,),
    "float64": (Real,),
    "string": (str,),
}

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def check_columns(columns: Mapping[str, str]) -> None:
    """Check the columns that an environment declares; raises SchemaError for a name or type that cannot be, or a name that is taken."""
    taken = {each.name for each in STATE_FIELDS}
    for name, kind in columns.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
            allowed = f"letters, digits and _, and not {', '.join(sorted(taken))}"
            raise SchemaError(f"a column of states cannot be called {name!r}: expected {allowed}")
        if kind not in TYPES:
            raise SchemaError(f"column {name!r} is of type {kind!r}, expected one of {', '.join(TYPES)}")


def states_schema_for(env: str, columns: Mapping[str, str]) -> pa.Schema:
    """Return the schema of the data set `states` for one environment and the columns that it declares."""
    return states_schema(env, {name: TYPES[kind] for name, kind in columns.items()})


def state_row(
    env: str,
    columns: Mapping[str, str],
    *,
    run: str,
    step: int,
    group: int,
    sample: int,
    trajectory_id: str,
    values: Mapping[str, object],
    error: str = "",
) -> Rows:
    """Build the row of `states` of one episode; a value of a wrong type becomes null, and the column `error` names it.

    Example: with columns {"guesses": "int64"}, the values {"guesses": "three"} give null and the error
    "guesses: expected int64, got 'three'".
    """
    schema = states_schema_for(env, columns)
    errors = [error] if error else []
    arrays: list[pa.Array] = []
    for name, kind in columns.items():
        value = values.get(name)
        try:
            if not _fits(kind, value):
                raise TypeError(kind)
            arrays.append(pa.array([value], TYPES[kind]))
        # The values are a user's: a wrong one must lose neither the rest of the row nor the episode.
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            arrays.append(pa.nulls(1, TYPES[kind]))
            errors.append(f"{name}: expected {kind}, got {_describe(value)}")
    errors += [f"{name}: no such column" for name in values if name not in columns]
    fixed = [run, step, group, sample, trajectory_id, printable("; ".join(errors))]
    keys = [pa.array([value], each.type) for value, each in zip(fixed, STATE_FIELDS, strict=True)]
    return pa.record_batch([*keys, *arrays], schema=schema)


def _describe(value: object) -> str:
    try:
        return f"{value!r:.200}"
    except Exception:  # noqa: BLE001 - an integer of thousands of digits, or code of a user's class
        return f"a {type(value).__name__} that cannot be shown"


def _fits(kind: str, value: object) -> bool:
    if value is None:
        return True
    if kind.startswith("list<"):
        if not isinstance(value, Collection) or isinstance(value, str | bytes | bytearray | Mapping):
            return False
        return all(_fits(kind[5:-1], each) for each in value)
    # For Python a bool is an integer, which Arrow would store as 0 or 1.
    return isinstance(value, _VALUES[kind]) and (kind == "bool" or not isinstance(value, bool))


def check_stored_columns(folder: RunFolder, env: str, columns: Mapping[str, str]) -> None:
    """Check that an environment declares the same columns as in the stored shards of a run, unless it declares none.

    Raises:
        RunMismatchError: a column is new, missing, of another type, or at another place.
        ShardError: a stored shard cannot be read.
    """
    files = open_files(folder)
    stored = files.keys(f"{partition_pattern('states', {'env': env})}/*.arrow")
    if not stored or not columns:
        return
    before = read_shard_schema(folder, stored[0])
    now = states_schema_for(env, columns)
    if not before.equals(now):
        unlike = {each.name for each in {*before} ^ {*now}}
        raise RunMismatchError(
            f"{folder.path('states')} has other columns of environment {env} than it keeps now, at "
            f"{', '.join(sorted(unlike)) or 'their order'}: stored are {_describe_columns(before)}, now {_describe_columns(now)}\n"
            "resume with the environment as it was, or begin a new run"
        )


def _describe_columns(schema: pa.Schema) -> str:
    named = [f"{each.name}: {each.type}" for each in schema if each not in STATE_FIELDS]
    return ", ".join(named) or "none"
