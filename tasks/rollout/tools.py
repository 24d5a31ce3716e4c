"""Parse tool calls in a policy's message, in the format of Qwen and Hermes models, and run tools."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from rollmill.tasks.errors import ToolError

_BEGIN, _END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: name and arguments."""

    name: str
    arguments: Mapping[str, object]


_to_call = msgspec.json.Decoder(ToolCall).decode


def tool_calls(said: str) -> list[ToolCall]:
    """Return the tool calls in a policy's message, in order; malformed ones are ignored.

    Example: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` gives ToolCall("add", {"a": 1}).
    """
    return [call for _, _, call in find_calls(said) if call is not None]


def find_calls(said: str) -> Iterator[tuple[int, int, ToolCall | None]]:
    """Yield (begin, end, call) of each block of a tool call in a policy's message, as indices into it; None for a malformed one."""
    begin = said.find(_BEGIN)
    while begin >= 0 and (end := said.find(_END, begin)) >= 0:
        try:
            call = _to_call(said[begin + len(_BEGIN) : end].strip())
        except (msgspec.DecodeError, RecursionError):
            # The policy's mistake: the environment sees that there is no call.
            call = None
        yield begin, end + len(_END), call
        begin = said.find(_BEGIN, end)


async def run_tool(tool: Callable[..., object], call: ToolCall) -> str:
    """Run a tool and return its result as text: a string unchanged, any other value as JSON.

    Arguments that do not fit the tool are the policy's mistake, and the result says so. An exception of the tool itself fails the
    trajectory.

    Raises:
        ToolError: the tool raised; names tool and error.
    """
    try:
        inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return f"error: {error}"
    try:
        answer = tool(**call.arguments)
        answer = await answer if inspect.isawaitable(answer) else answer
        return answer if isinstance(answer, str) else json.dumps(answer)
    except Exception as error:
        raise ToolError(f"tool {call.name} raised {type(error).__name__}: {error}") from error
