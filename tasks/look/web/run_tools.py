"""Tools by which coding agents read runs, served by the Model Context Protocol; none of them changes anything."""

import json
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import version
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from rollmill.tasks.errors import ConfigError, RollmillError, mask_credentials
from rollmill.tasks.look.ledger.run_ledger import read_ledger
from rollmill.tasks.look.tables.cost_view import select_costs_view
from rollmill.tasks.look.tables.ledger_tables import ledger_values
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.run_list import make_runs_view
from rollmill.tasks.look.tables.run_tables import select_view
from rollmill.tasks.look.tables.selection import Interval, Level, Selection, parse_names
from rollmill.tasks.look.tables.trajectory_record import find_trajectory
from rollmill.tasks.look.terminal.output import encode_json
from rollmill.tasks.store.folders import RunFolder

INSTRUCTIONS = (
    "Runs of Rollmill, a reinforcement-learning system for language models. A step samples groups of trajectories, scores and trains on "
    "them. A trajectory is named GROUP.SAMPLE, such as 12.3, or v10.0.greedy if it is held out. Begin with list_runs and inspect_run; "
    "query answers everything else in SQL."
)
MAX_ROWS = 200
"""Largest number of rows that a tool returns."""


class RunTools:
    """The tools; `find` returns a run's folder by its name or location, and raises ConfigError if there is none."""

    def __init__(self, find: Callable[[str], RunFolder], root: str) -> None:
        self._find, self._root = find, root

    def list_runs(self) -> dict[str, Any]:
        """List the runs, newest first: state, steps done and planned, last held-out reward and greedy accuracy."""
        return _plain(make_runs_view(self._root, MAX_ROWS).values)

    def inspect_run(
        self,
        run: str,
        rows: Level | None = None,
        step: str = "",
        group: int | None = None,
        status: str = "",
        reward: str = "",
        evaluations: bool = False,
        sort: str = "",
        limit: int = 50,
    ) -> dict[str, Any]:
        """Show steps, groups, trajectories or costs of a run, filtered and sorted.

        Args:
            run: name or folder.
            rows: steps, groups, trajectories or costs; by default what the other arguments imply.
            step: "3" or "3:7"; with evaluations, policy versions.
            group: only this group.
            status: complete, truncated, failed, cancelled, unscored; for groups trained, or the reason why not.
            reward: "LOW:HIGH".
            evaluations: held-out trajectories instead of sampled ones.
            sort: column, with - largest first.
            limit: largest number of rows.
        """
        selection = Selection(
            level=rows,
            steps=Interval.parse("step", step) if step else None,
            group=group,
            status=parse_names("status", status),
            reward=Interval.parse("reward", reward) if reward else None,
            evaluations=evaluations,
            sort=sort,
            limit=max(1, min(limit, MAX_ROWS)),
        )
        select = select_costs_view if selection.resolved_level == "costs" else select_view
        return _plain(select(self._find(run), selection).values)

    def read_trajectory(self, run: str, trajectory: str) -> dict[str, Any]:
        """Read one trajectory: its messages, reward and components, error, versions and durations."""
        return _plain(find_trajectory(self._find(run), trajectory).values())

    def query(self, runs: list[str], sql: str, limit: int = MAX_ROWS) -> dict[str, Any]:
        """Run a query in DuckDB's SQL over one run or several.

        Views: trajectories (rollouts joined with rewards and advantages; columns run, step, group, sample, reward, advantage, status,
        n_completion_tokens, messages, ...), costs, and the data sets rollouts, scores, groups, batches, evaluations, metrics, spans.
        Example: select step, avg(reward) from trajectories group by step order by step
        """
        if not runs:
            raise ConfigError("runs", runs, "name at least one run; list_runs lists them")
        found = RunFrames([self._find(run) for run in runs]).sql(sql, reads_files=False)
        return _plain({"n": len(found), "rows": found.head(max(1, min(limit, MAX_ROWS))).to_dicts()})

    def explain_time(self, run: str, step: str = "") -> dict[str, Any]:
        """Explain where the time of steps went: owners, waits, critical path, and what would shorten a step; step is "3" or "3:7"."""
        folder = self._find(run)
        interval = Interval.parse("step", step) if step else None
        return _plain(ledger_values(folder.location, read_ledger(folder, interval)))


def make_server(find: Callable[[str], RunFolder], root: str) -> MCPServer:
    """Create the server of the tools; an error of Rollmill is the tool's answer."""
    server = MCPServer("rollmill", instructions=INSTRUCTIONS, version=version("rollmill"), log_level="ERROR")
    tools = RunTools(find, root)
    for call in (tools.list_runs, tools.inspect_run, tools.read_trajectory, tools.query, tools.explain_time):
        server.tool(annotations=ToolAnnotations(read_only_hint=True))(_report_errors(call))
    return server


def _report_errors(call: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(call)
    def reported(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return call(*args, **kwargs)
        except RollmillError as error:
            raise ToolError(mask_credentials(str(error))) from error

    return reported


def _plain(values: Mapping[str, object]) -> dict[str, Any]:
    """Return values as JSON has them: NaN is null, times are texts, and half a surrogate pair, which UTF-8 lacks, is "?"."""
    text = json.dumps(json.loads(encode_json(values)), ensure_ascii=False)
    plain: dict[str, Any] = json.loads(text.encode(errors="replace"))
    return plain
