"""Rows of older schema versions, as rows of today's."""

import pyarrow as pa

from tasks.errors import SchemaError
from tasks.store.schemas import SCHEMA_VERSION


def version_of(schema: pa.Schema) -> int:
    """The schema version of a shard, by its schema.

    Raises:
        SchemaError: it says none, or a newer Rollmill wrote it.
    """
    told = (schema.metadata or {}).get(b"schema_version", b"").decode()
    if not told.isdecimal():
        raise SchemaError("its schema says no schema_version; it is no shard of Rollmill's")
    if int(told) > SCHEMA_VERSION:
        raise SchemaError(
            f"it has schema version {told}, and this Rollmill reads up to {SCHEMA_VERSION}; use a newer one"
        )
    return int(told)


def schema_at(schema: pa.Schema, version: int) -> pa.Schema:
    """Those columns of a schema that it had in an earlier version; a version's columns never change their type."""
    if version == SCHEMA_VERSION:
        return schema
    fields = [field for field in schema if _since(field) <= version]
    return pa.schema(fields, metadata=schema.metadata)


def upgrade(rows: pa.Table, schema: pa.Schema, from_version: int) -> pa.Table:
    """Rows of an earlier version as rows of `schema`, today's or some columns of it, in its order.

    Columns added since hold their defaults; nothing else changes, and no value is copied.

    Example: a row of `batches` of version 1 gets scorer "".
    """
    if from_version == SCHEMA_VERSION:
        return pa.Table.from_arrays([rows[name] for name in schema.names], schema=schema)
    columns = [
        rows[field.name] if _since(field) <= from_version else _default(field, rows.num_rows)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _since(field: pa.Field) -> int:
    return int((field.metadata or {}).get(b"since", b"1"))


def _default(field: pa.Field, n_rows: int) -> pa.Array:
    text = (field.metadata or {}).get(b"default", b"").decode()
    return pa.repeat(pa.scalar(text).cast(field.type), n_rows)
