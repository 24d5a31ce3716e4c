"""One trajectory as a person reads it: what became of it, the conversation, its tokens."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.looking.found import Found
from flows.looking.view import counted, visible

INDENT = 2
"""Cells between a fact's name and the fact, and before what was said."""
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


SHOWN_CHARACTERS = 20_000
"""Of one text on a terminal: some 250 of its lines."""


def print_trajectory(console: Console, found: Found) -> None:
    """Print what became of a trajectory, and its conversation.

    A terminal's lines are broken at its width, and long texts cut; in a file or a pipe all is as it was said.
    """
    if console.is_terminal:
        _print_page(console, found)
    else:
        _print_plainly(console, found)


def _print_page(console: Console, found: Found) -> None:
    table = Table.grid(padding=(0, INDENT))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(found):
        table.add_row(name, _cut(value))
    console.print(table)
    for message in found.row["messages"]:
        colour = ROLES.get(message["role"], "white")
        console.print(Rule(Text(heading(message), f"bold {colour}"), align="left", style=colour))
        for text, style in said(message):
            console.print(Padding(_cut(text, style), (0, 0, 0, INDENT)))


def _cut(text: str, style: str = "") -> Text:
    """The beginning of a text for a terminal, every character of it to be seen, and how to read the rest."""
    shown = Text(visible(text[:SHOWN_CHARACTERS]), style)
    if (more := len(text) - SHOWN_CHARACTERS) > 0:
        shown.append(f" … {more:,} more characters: write it to a file (> FILE) to have all", "italic dim")
    return shown


def _print_plainly(console: Console, found: Found) -> None:
    known = [(name, visible(value)) for name, value in facts(found)]
    width = max(len(name) for name, _ in known) + INDENT
    lines = [f"{name:{width}}{value}" for name, value in known]
    for message in found.row["messages"]:
        lines.append(f"{heading(message)} {'─' * (console.width - cell_len(heading(message)) - 1)}")
        lines += [f"{' ' * INDENT}{line}" for text, _ in said(message) for line in visible(text).split("\n")]
    console.file.write("".join(f"{line}\n" for line in lines))


def facts(found: Found) -> Iterator[tuple[str, str]]:
    """What is known of a trajectory beside its conversation, by name; nothing of it has been made visible yet."""
    row = found.row
    kind = "greedy" if row.get("greedy") else "sampled"
    where = f"held out, policy version {row['step']}, {kind}" if found.is_held_out else f"step {row['step']}"
    yield "trajectory", f"{found.short}  ({row['trajectory_id']})"
    place = "" if found.is_held_out else f", group {row['group']}, sample {row['sample']}"
    yield "of", f"{where}{place}, {row['env']} {row['example_id']}"
    finish = f", finish reason {row['finish_reason']}" if row["finish_reason"] else ""
    yield "status", f"{row['status']}{finish}, {counted(row['turns'], 'turn')}"
    if row["error_type"]:
        yield "error", f"{row['error_type']}: {row['error']}"
    yield from _rewards(found)
    yield "tokens", f"{row['n_prompt_tokens']} of the prompt, {row['n_completion_tokens']} sampled"
    yield "policy version", _versions(row)
    yield (
        "seconds",
        (
            f"{row['duration_s']:.3f}: {row['generate_s']:.3f} generating, {row['environment_s']:.3f} environment; "
            f"{row['queue_s']:.3f} queued before"
        ),
    )
    yield "began", f"{row['started_at']:%Y-%m-%d %H:%M:%S} UTC{row['server'] and ' at ' + row['server']}"
    yield "example", json.dumps(row["example"], ensure_ascii=False)
    if row["outcome"]:
        yield "outcome", json.dumps(row["outcome"], ensure_ascii=False)


def _rewards(found: Found) -> Iterator[tuple[str, str]]:
    row = found.row
    if found.is_held_out:
        yield "reward", _reward(found.row)
        return
    for score in found.scores:
        name = f"{score['scorer']}@{score['version']}"
        failed = (
            f", {score['status']}: {score['error_type']}: {score['error']}" if score["error_type"] else ""
        )
        yield "reward", f"{_reward(score)} by {name}{failed}"
    if not found.scores:
        yield "reward", "none: it failed" if row["error_type"] else "none yet"
    yield "advantage", _advantage(found)


def _advantage(found: Found) -> str:
    """Its advantage, or why it has none, beside its group's rewards."""
    group = found.group
    if not group:
        return "none: its group is not done"
    figures = f"mean {group['reward_mean']:.3f}, std {group['reward_std']:.3f}"
    spread = f"({group['survived']} of {group['expected']} survived: {figures})"
    if found.advantage is not None:
        return f"{found.advantage:+.3f}  {spread}"
    return f"not trained on: {group['reason'] or 'it has no reward'}  {spread}"


def _reward(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in row["components"].items())
    reward = "none" if math.isnan(row["reward"]) else f"{row['reward']:.3f}"
    return f"{reward}{parts and f'  ({parts})'}"


def _versions(row: Mapping[str, Any]) -> str:
    """Example: "2 from token 6, 3 from token 20"; "none" where nothing was sampled."""
    spans = list(zip(row["version_span_versions"], row["version_span_starts"], strict=True))
    if len({version for version, _ in spans}) == 1:
        return str(spans[0][0])
    return (
        ", ".join(f"{version} from token {start}" for version, start in spans) or "none: nothing was sampled"
    )


def heading(message: Mapping[str, Any]) -> str:
    """Who says a message, and to which call of a tool it is the answer."""
    name = f" {message['name']}" if message.get("name") else ""
    answers = f" (answers {message['tool_call_id']})" if message.get("tool_call_id") else ""
    return visible(f"{message['role']}{name}{answers}")


def said(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a message says and the tools it calls, each with its style; nothing of it has been made visible yet."""
    if message["content"]:
        yield str(message["content"]), ""
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        yield f"→ {function.get('name', '?')}({function.get('arguments', '')})", "yellow"
