"""Print one trajectory: its outcome, the conversation, its tokens."""

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

from rollmill.tasks.look.tables.segment_views import list_segment_views
from rollmill.tasks.look.tables.trajectory_record import TrajectoryRecord
from rollmill.tasks.look.tables.view import count_noun, escape_controls

INDENT = 2
"""Indentation in cells of facts and messages."""
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
SHOWN_CHARACTERS = 20_000
"""Most characters of one text shown at once, on a terminal about 250 lines."""


def print_trajectory(console: Console, found: TrajectoryRecord) -> None:
    """Print the outcome of a trajectory and its conversation; of several segments one after another, each with its own messages.

    On a terminal, lines are wrapped and long texts cut; into a file or a pipe everything is written unchanged.
    """
    if not console.is_terminal:
        _print_plain(console, found)
        return
    table = Table.grid(padding=(0, INDENT))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in list_facts(found):
        table.add_row(name, _cut_text(value))
    console.print(table)
    for segment in list_segment_views(found.row):
        if segment.heading:
            console.print(Rule(Text(segment.heading, "bold"), align="left", characters="═"))
        for message in segment.messages:
            colour = ROLES.get(message["role"], "white")
            console.print(Rule(Text(message_heading(message), f"bold {colour}"), align="left", style=colour))
            for text, style in message_texts(message):
                console.print(Padding(_cut_text(text, style), (0, 0, 0, INDENT)))


def _cut_text(text: str, style: str = "") -> Text:
    """Return the beginning of a text with visible control characters, and a note if the rest was cut off."""
    shown = Text(escape_controls(text[:SHOWN_CHARACTERS]), style)
    if (more := len(text) - SHOWN_CHARACTERS) > 0:
        shown.append(f" … {more:,} more characters: write it to a file (> FILE) to have all", "italic dim")
    return shown


def _print_plain(console: Console, found: TrajectoryRecord) -> None:
    known = [(name, escape_controls(value)) for name, value in list_facts(found)]
    width = max(len(name) for name, _ in known) + INDENT
    lines = [f"{name:{width}}{value}" for name, value in known]
    for segment in list_segment_views(found.row):
        lines += [_rule(segment.heading, "═", console.width)] if segment.heading else []
        for message in segment.messages:
            lines.append(_rule(message_heading(message), "─", console.width))
            for text, _ in message_texts(message):
                lines += [f"{' ' * INDENT}{line}" for line in escape_controls(text).split("\n")]
    # Rich would wrap lines, which a file should have as they are.
    console.file.write("".join(f"{line}\n" for line in lines))


def _rule(heading: str, character: str, width: int) -> str:
    return f"{heading} {character * (width - cell_len(heading) - 1)}"


def list_facts(found: TrajectoryRecord) -> Iterator[tuple[str, str]]:
    """Yield (name, value) texts about a trajectory, such as status and tokens, without escaping control characters."""
    row = found.row
    kind = "greedy" if row.get("greedy") else "sampled"
    where = f"held out, policy version {row['step']}, {kind}" if found.is_held_out else f"step {row['step']}"
    yield "trajectory", f"{found.short}  ({row['trajectory_id']})"
    place = "" if found.is_held_out else f", group {row['group']}, sample {row['sample']}"
    yield "position", f"{where}{place}, {row['env']} {row['example_id']}"
    finish = f", finish reason {row['finish_reason']}" if row["finish_reason"] else ""
    yield "status", f"{row['status']}{finish}, {count_noun(row['turns'], 'turn')}"
    if row["error_type"]:
        yield "error", f"{row['error_type']}: {row['error']}"
    yield from _rewards(found)
    yield "tokens", f"{row['n_prompt_tokens']} of the prompt, {row['n_completion_tokens']} sampled"
    yield "policy version", _versions(row)
    parts = f"{row['generate_s']:.3f} generating, {row['environment_s']:.3f} environment"
    yield "seconds", f"{row['duration_s']:.3f}: {parts}; {row['queue_s']:.3f} queued"
    yield "began", f"{row['started_at']:%Y-%m-%d %H:%M:%S} UTC{row['server'] and ' at ' + row['server']}"
    yield "example", json.dumps(row["example"], ensure_ascii=False)
    if row["outcome"]:
        yield "outcome", json.dumps(row["outcome"], ensure_ascii=False)


def _rewards(found: TrajectoryRecord) -> Iterator[tuple[str, str]]:
    row = found.row
    if found.is_held_out:
        yield "reward", _reward(found.row)
        return
    for score in found.scores:
        name = f"{score['scorer']}@{score['version']}"
        error = f", {score['status']}: {score['error_type']}: {score['error']}"
        yield "reward", f"{_reward(score)} by {name}{error if score['error_type'] else ''}"
    if not found.scores:
        yield "reward", "none: it failed" if row["error_type"] else "none yet"
    yield "advantage", _advantage(found)


def _advantage(found: TrajectoryRecord) -> str:
    """Describe a trajectory's advantage, or why it has none, with mean and std of its group's rewards."""
    group = found.group
    if not group:
        return "none: its group is not done"
    figures = f"mean {group['reward_mean']:z.3f}, std {group['reward_std']:.3f}"
    spread = f"({group['survived']} of {group['expected']} survived: {figures})"
    if found.advantage is not None:
        by_turn = ", ".join("-" if each is None else f"{each:+z.3f}" for each in found.turn_advantages)
        return f"{found.advantage:+z.3f}{by_turn and f' on average, by turn {by_turn}'}  {spread}"
    has_reward = any(not math.isnan(score["reward"]) for score in found.scores)
    why = group["reason"] or ("no batch has it" if has_reward else "it has no reward")
    return f"not trained on: {why}  {spread}"


def _reward(row: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in row["components"].items())
    reward = "none" if math.isnan(row["reward"]) else f"{row['reward']:z.3f}"
    turns = ", ".join(f"{each:g}" for each in row.get("turn_rewards", ()))
    return f"{reward}{parts and f'  ({parts})'}{turns and f'  (by turn {turns})'}"


def _versions(row: Mapping[str, Any]) -> str:
    """Describe which policy versions sampled a trajectory. Example: "2", or "2 from token 6, 3 from token 20"."""
    spans = list(zip(row["version_span_versions"], row["version_span_starts"], strict=True))
    if len({version for version, _ in spans}) == 1:
        return str(spans[0][0])
    none = "unknown: it was imported" if row["n_completion_tokens"] else "none: nothing was sampled"
    return ", ".join(f"{version} from token {start}" for version, start in spans) or none


def message_heading(message: Mapping[str, Any]) -> str:
    """Return the role of a message, and the tool call it answers."""
    name = f" {message['name']}" if message.get("name") else ""
    answers = f" (answers {message['tool_call_id']})" if message.get("tool_call_id") else ""
    return escape_controls(f"{message['role']}{name}{answers}")


def message_texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts and tool calls of a message, each with its style; control characters are not escaped yet."""
    if message.get("content"):
        yield str(message["content"]), ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield f"→ {function.get('name', '?')}({function.get('arguments', '')})", "yellow"
