"""Addresses of the viewer's pages, and their queries. docs/how-to/viewer.md documents them."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.selection import Interval, Selection, parse_names

HOME, RUNS, GROUPS, TRAJECTORIES, HELD_OUT = "/", "/runs", "/groups", "/trajectories", "/held-out"
TRAJECTORY, COMPARE, PAIR, TIMING = "/trajectory/", "/compare", "/pair/", "/time"
FILTERS = ("step", "group", "status", "env", "reward", "scorer", "text", "where", "sort")
"""Parameters of a query, in the order they are written; named like the options of `rollmill inspect`."""


@dataclass(frozen=True, slots=True)
class Query:
    """The non-empty parameters of a URL's query string, by name."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, search: str) -> "Query":
        """Parse "?step=12&status=failed"; unknown parameters are ignored."""
        known = (*FILTERS, "a", "b", "by")
        return cls({k: v for k, v in parse_qsl(search.removeprefix("?")) if k in known and v})

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")

    def but(self, **values: str) -> "Query":
        """Return a copy with other values; an empty value removes the parameter."""
        return Query({k: v for k, v in (dict(self.values) | values).items() if v})

    @property
    def search(self) -> str:
        """The query as written in a URL, empty without parameters. Example: "?step=12&status=failed"."""
        return f"?{urlencode(self.values)}" if self.values else ""

    def selection(self, *, evaluations: bool = False) -> Selection:
        """Return the selection that the parameters describe; raises ConfigError for what is no valid number, range or list."""
        group = Interval.parse("group", self["group"]) if self["group"] else None
        if group and not (group.is_single and group.low.is_integer()):
            raise ConfigError("group", self["group"], "give the number of one group, such as 784")
        return Selection(
            steps=Interval.parse("step", self["step"]) if self["step"] else None,
            group=int(group.low) if group else None,
            status=parse_names("status", self["status"]),
            env=self["env"],
            reward=Interval.parse("reward", self["reward"]) if self["reward"] else None,
            scorer=self["scorer"],
            evaluations=evaluations,
            sort=self["sort"],
        )


def trajectory_url(short: str) -> str:
    """Return the path of a trajectory's page. Example: /trajectory/784.6."""
    return f"{TRAJECTORY}{quote(short, safe='')}"
