"""`rollmill mcp`: what a coding agent reads of runs, by a client of the Model Context Protocol."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from rollmill.tasks.look.web.run_tools import _plain, make_server
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.run_search import find_run


@pytest.fixture
async def client(small_run: RunFolder) -> Client:
    return Client(make_server(find_run, str(small_run.local.parent)))


async def call(client: Client, tool: str, **arguments: object) -> Mapping[str, Any]:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer
    assert answer.structured_content is not None
    return answer.structured_content


async def test_an_agent_reads_runs_groups_trajectories_and_times(
    client: Client, small_run: RunFolder
) -> None:
    run = small_run.location
    async with client:
        tools = (await client.list_tools()).tools
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
        assert [each["run"] for each in (await call(client, "list_runs"))["runs"]] == ["small"]
        steps = await call(client, "inspect_run", run=run)
        assert [each["step"] for each in steps["by_step"]] == [0, 1, 2]
        groups = await call(client, "inspect_run", run=run, step="1", limit=2)
        assert len(groups["groups"]) == 2
        found = await call(client, "read_trajectory", run=run, trajectory="5.3")
        assert found["error_type"] == "RequestError"
        rows = await call(client, "query", runs=[run], sql="select count(*) as n from trajectories")
        assert rows == {"n": 1, "rows": [{"n": 48}]}


def test_half_a_surrogate_pair_that_a_model_wrote_is_a_question_mark() -> None:
    assert _plain({"said": "a\ud83d", "reward": float("nan")}) == {"said": "a?", "reward": None}


async def test_errors_are_answers_and_nothing_is_written(
    client: Client, small_run: RunFolder, tmp_path: Path
) -> None:
    async with client:
        unknown = await client.call_tool("inspect_run", {"run": "nowhere"})
        assert unknown.is_error
        assert "there is no run in this folder" in str(unknown.content)
        nothing = await client.call_tool("query", {"runs": [], "sql": "select 1"})
        assert "name at least one run" in str(nothing.content)
        costs = await client.call_tool("inspect_run", {"run": small_run.location, "rows": "costs"})
        assert costs.is_error
        assert "it has no stored spans" in str(costs.content)
        target = tmp_path / "copied.csv"
        sql = f"copy (select 1) to '{target}'"
        refused = await client.call_tool("query", {"runs": [small_run.location], "sql": sql})
        assert refused.is_error
        assert not target.exists()


@pytest.mark.slow
async def test_the_command_serves_on_standard_input_and_output(small_run: RunFolder) -> None:
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "rollmill.flows.cli", "mcp"],
        cwd=small_run.local.parent.parent,
        env=dict(os.environ),
    )
    async with Client(stdio_client(command)) as client:
        assert [each["run"] for each in (await call(client, "list_runs"))["runs"]] == ["small"]
