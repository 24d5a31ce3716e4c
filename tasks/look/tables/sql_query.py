"""Queries in SQL over frames, with DuckDB."""

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import polars as pl

from rollmill.tasks.errors import ConfigError

_CHANGING_FUNCTIONS = (
    "select distinct function_name from duckdb_functions() where stability <> 'CONSISTENT' order by all"
)
# A query that may not read files may not change that either, nor write what does not fit into memory to a disk.
_CLOSED = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "lock_configuration": "true",
}
WEIGHT_EXAMPLE, ORDER_EXAMPLE = "coalesce(reward_std, 0)", 'hash(step, "group")'
"""A weight and an order in SQL, as errors give them."""
MOST_MEMORY = "2GB"
"""Memory of a query with a time limit, besides the rows that it reads."""
_DAMAGE = " (if a shard is damaged, `rollmill verify` names it)"
# Texts that become the time of the query where they are read as times.
_CHANGING_TEXTS = re.compile(
    r"('(?:now|today|yesterday|tomorrow)')\s*::|\b(?:cast\s*\(|date|time\w*)\s*('(?:now|today|yesterday|tomorrow)')",
    re.IGNORECASE,
)
_TEXTS_AND_COMMENTS = re.compile(r"'[^']*'|--[^\n]*|/\*.*?\*/", re.DOTALL)


def run_query(
    field: str,
    given: str,
    query: str,
    views: Mapping[str, Callable[[], pl.LazyFrame]],
    *,
    reads_files: bool = False,
    longest_s: float | None = None,
) -> pl.DataFrame:
    """Run a query over views, each of which is made only if the query has its name.

    Args:
        field: name of what was given, for errors.
        given: the text that the user gave, of which `query` is made.
        query: of DuckDB.
        views: by name.
        reads_files: True if the query may read files.
        longest_s: seconds after which the query is ended; its memory is limited too. None: no limits.

    Raises:
        ConfigError: the query is wrong, reads from a view that does not exist, or exceeds a limit.
    """
    import duckdb  # it takes long to import, and only queries in SQL need it

    config: dict[str, str | bool | int | float | list[str]] = {} if reads_files else {**_CLOSED}
    if longest_s is not None:
        config["memory_limit"] = MOST_MEMORY
    known = f"there are the views {', '.join(views)}"
    try:
        if not duckdb.extract_statements(query):
            raise ConfigError(field, given, f"it is empty: give a query, such as select 1; {known}")
        return _query(query, views, config, longest_s)
    except duckdb.Error as error:
        # Its traceback has DuckDB's connection. Prefect keeps the errors of a flow, and DuckDB prints what is kept until the process ends.
        raise ConfigError(field, given, _find_remedy(error, known, longest_s)) from error.with_traceback(None)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(field, given, _explain_rows(error)) from error.with_traceback(None)


def _query(
    query: str,
    views: Mapping[str, Callable[[], pl.LazyFrame]],
    config: dict[str, str | bool | int | float | list[str]],
    longest_s: float | None,
) -> pl.DataFrame:
    import duckdb

    with duckdb.connect(config=config) as connection:
        # Listing the files of a data set takes time: only those that the query may read are registered.
        for name in sorted(set(views) & set(re.findall(r"\w+", query.lower()))):
            connection.register(name, views[name]())
        with _interrupt_after(longest_s, connection.interrupt):
            result = connection.sql(query)
            found: pl.DataFrame = pl.DataFrame() if result is None else result.pl()
        return found.with_columns(_as_number(column) for column in found if column.dtype == pl.Decimal)


def _as_number(decimals: pl.Series) -> pl.Series:
    """Convert decimals, as which DuckDB gives sums of integers, to integers, or to floats if they are none or too large."""
    kind = decimals.dtype
    if isinstance(kind, pl.Decimal) and kind.scale == 0:
        with suppress(pl.exceptions.PolarsError):
            return decimals.cast(pl.Int64)
    return decimals.cast(pl.Float64)


def _explain_rows(error: pl.exceptions.PolarsError) -> str:
    """Return what to do about rows that Polars cannot read, or cannot take from DuckDB."""
    if "interval" in str(error):
        return "the result has a length of time: give it as seconds, such as epoch(a - b)"
    return f"{error}{_DAMAGE if isinstance(error, pl.exceptions.ComputeError) else ''}"


def _find_remedy(error: Exception, known: str, longest_s: float | None) -> str:
    """Return what to do about an error of DuckDB; `known` lists the views, and the query was to end within `longest_s` seconds."""
    import duckdb

    if isinstance(error, duckdb.CatalogException):
        return f"{error}; {known}"
    if isinstance(error, duckdb.PermissionException):
        return f"{error}; this query reads no files, {known}"
    if isinstance(error, duckdb.InterruptException):
        return f"it takes longer than {longest_s:g} s; select fewer rows"
    if isinstance(error, duckdb.OutOfMemoryException):
        return f"it needs more than {MOST_MEMORY} of memory; select fewer rows"
    # An error of Polars in a view that DuckDB reads.
    return f"{error}{_DAMAGE if 'ComputeError' in str(error) else ''}"


@contextmanager
def _interrupt_after(longest_s: float | None, interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` if the block lasts `longest_s` seconds; None: never."""
    if longest_s is None:
        yield
        return
    timer = threading.Timer(longest_s, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def check_condition(field: str, given: str) -> None:
    """Raise ConfigError if a condition in SQL is no single expression: it cannot be read, or is more than one statement."""
    import duckdb

    try:
        statements = duckdb.extract_statements(f"select * from rows where ({given}\n)")
    except duckdb.Error as error:
        # The parenthesis that follows the condition is ours, not the user's.
        is_unfinished = 'at or near ")"' in str(error)
        remedy = "something is missing at its end or before a )" if is_unfinished else str(error)
        raise ConfigError(field, given, f"{remedy}; a condition is such as reward > 0.5") from error
    if len(statements) != 1:
        raise ConfigError(field, given, "give one condition, without semicolons")


def refuse_changing(field: str, given: str, example: str = '"group" % 4 = 0') -> None:
    """Raise ConfigError, which has an `example` of the field, if an expression calls a function whose value changes from query to query."""
    changing = run_query(field, given, _CHANGING_FUNCTIONS, {})["function_name"]
    called = (
        rf"\b(?:({'|'.join(changing)})\"?\s*\(|((?:current_(?:date|time|timestamp)|localtime(?:stamp)?))\b)"
    )
    found = re.search(called, _TEXTS_AND_COMMENTS.sub(" ", given), re.IGNORECASE)
    if call := found or _CHANGING_TEXTS.search(given):
        remedy = f"{call[1] or call[2]} would give other values each time the run is resumed; compute with the columns, such as {example}"
        raise ConfigError(field, given, remedy)


def check_weight(field: str, given: str, value: object, of: str) -> float:
    """Return a weight as a number; raise ConfigError, which names what it is the weight `of`, if it is missing, negative or infinite."""
    if isinstance(value, float) and 0.0 <= value < math.inf:
        return value
    remedy = f"it is {value} for {of}; give a number of at least 0, such as {WEIGHT_EXAMPLE}"
    raise ConfigError(field, given, remedy)
