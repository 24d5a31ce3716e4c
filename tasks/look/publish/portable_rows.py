"""Rows in the types that Delta, Iceberg, Lance and Parquet readers share, under names that every catalog allows."""

import re

import pyarrow as pa


def convert_rows(rows: pa.Table) -> pa.Table:
    """Return the same values without large offsets, in nullable columns that carry their meaning as a comment.

    A table that gets a column later has null in earlier rows, which a column that is not nullable cannot have.
    """
    return rows.cast(pa.schema([_convert_field(each) for each in rows.schema]))


def table_name(dataset: str) -> str:
    """Return the name of the table of a data set. Example: states-guess is states_guess."""
    return re.sub(r"\W+", "_", dataset)


def _convert_field(field: pa.Field) -> pa.Field:
    texts = {key.decode(): text.decode() for key, text in (field.metadata or {}).items()}
    details = [f"{key} {texts[key]}" for key in ("unit", "shape") if key in texts]
    comment = "; ".join([texts.get("meaning", ""), *details])
    # Delta reads `comment`, Iceberg `doc`.
    return pa.field(field.name, _convert_type(field.type), metadata={"comment": comment, "doc": comment})


def _convert_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.list_(_convert_type(kind.value_type))
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    return kind
