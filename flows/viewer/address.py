"""Addresses of the viewer: what its pages read of a query, and write into one.

Others link to these; docs/viewer.md lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from flows.looking.selection import Interval, Selection, names_in

HOME, GROUPS, TRAJECTORIES, HELD_OUT = "/", "/groups", "/trajectories", "/held-out"
TRAJECTORY, COMPARE, BESIDE, TIMING = "/trajectory/", "/compare", "/beside/", "/time"
FILTERS = ("step", "group", "status", "env", "reward", "scorer", "text", "sort")
"""Names of a query's parts, in the order in which they are written; the options of `rollmill inspect` are called so."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a table is asked for.

    Attributes:
        values: the parts of the address that are not empty.
    """

    values: Mapping[str, str]

    @classmethod
    def of(cls, search: str) -> "Query":
        """Read "?step=12&status=failed"; names that no page knows are left out."""
        known = (*FILTERS, "a", "b", "by")
        return cls({k: v for k, v in parse_qsl(search.removeprefix("?")) if k in known and v})

    def __getitem__(self, name: str) -> str:
        return self.values.get(name, "")

    def but(self, **values: str) -> "Query":
        """The same with other values; an empty one goes."""
        return Query({k: v for k, v in (dict(self.values) | values).items() if v})

    @property
    def search(self) -> str:
        """As it stands in an address. Example: "?step=12&status=failed"."""
        return f"?{urlencode(self.values)}" if self.values else ""

    def selection(self, *, evaluations: bool = False) -> Selection:
        """What is selected by it.

        Raises:
            ConfigError: a part is no number, range or list.
        """
        group = Interval.parse("group", self["group"]) if self["group"] else None
        return Selection(
            steps=Interval.parse("step", self["step"]) if self["step"] else None,
            group=int(group.low) if group else None,
            status=names_in("status", self["status"]),
            env=self["env"],
            reward=Interval.parse("reward", self["reward"]) if self["reward"] else None,
            scorer=self["scorer"],
            evaluations=evaluations,
            sort=self["sort"],
        )


def trajectory_address(short: str) -> str:
    """Where a trajectory is read. Example: /trajectory/784.6."""
    return f"{TRAJECTORY}{quote(short, safe='')}"


def beside_address(first: str, second: str) -> str:
    """Where two trajectories stand side by side. Example: /beside/v0.1.greedy/v3.1.greedy."""
    return f"{BESIDE}{quote(first, safe='')}/{quote(second, safe='')}"
