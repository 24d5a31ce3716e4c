"""Queries in SQL over frames, with DuckDB."""

import math
import re
from collections.abc import Callable, Mapping

import polars as pl

from rollmill.tasks.errors import ConfigError

_CHANGING_FUNCTIONS = (
    "select distinct function_name from duckdb_functions() where stability <> 'CONSISTENT' order by all"
)
_TEXTS_AND_COMMENTS = re.compile(r"'[^']*'|--[^\n]*|/\*.*?\*/", re.DOTALL)


def run_query(
    field: str,
    given: str,
    query: str,
    views: Mapping[str, Callable[[], pl.LazyFrame]],
    *,
    reads_files: bool = False,
) -> pl.DataFrame:
    """Run a query over views, each of which is made only if the query has its name.

    Args:
        field: name of what was given, for errors.
        given: the text that the user gave, of which `query` is made.
        query: of DuckDB.
        views: by name.
        reads_files: True if the query may read files.

    Raises:
        ConfigError: the query is wrong, or reads from a view that does not exist.
    """
    import duckdb  # it takes long to import, and only queries in SQL need it

    try:
        with duckdb.connect(config={"enable_external_access": str(reads_files)}) as connection:
            # Listing the files of a data set takes time: only those that the query may read are registered.
            for name in sorted(set(views) & set(re.findall(r"\w+", query.lower()))):
                connection.register(name, views[name]())
            result = connection.sql(query)
            found: pl.DataFrame = pl.DataFrame() if result is None else result.pl()
            return found
    except duckdb.Error as error:
        known = f"there are the views {', '.join(views)}"
        remedy = f"{error}; {known}" if isinstance(error, duckdb.CatalogException) else str(error)
        raise ConfigError(field, given, remedy) from error
    except pl.exceptions.PolarsError as error:
        remedy = f"{error} (if a shard is damaged, `rollmill verify` names it)"
        raise ConfigError(field, given, remedy) from error


def refuse_changing(field: str, given: str) -> None:
    """Raise ConfigError if an expression calls a function whose value changes from query to query."""
    changing = run_query(field, given, _CHANGING_FUNCTIONS, {})["function_name"]
    called = rf"\b(?:({'|'.join(changing)})\"?\s*\(|(current_(?:date|time|timestamp))\b)"
    if call := re.search(called, _TEXTS_AND_COMMENTS.sub(" ", given), re.IGNORECASE):
        remedy = f'{call[1] or call[2]} would give other values each time the run is resumed; compute with the columns, such as "group" % 4 = 0'
        raise ConfigError(field, given, remedy)


def check_weight(field: str, given: str, value: object, of: str) -> float:
    """Return a weight as a number; raise ConfigError, which names what it is the weight `of`, if it is missing, negative or infinite."""
    if isinstance(value, float) and 0.0 <= value < math.inf:
        return value
    remedy = f"it is {value} for {of}; give a number of at least 0, such as coalesce(reward_std, 0)"
    raise ConfigError(field, given, remedy)
