"""Calls of tools in what a policy says, as Qwen and Hermes models write them, and running a tool."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from tasks.errors import ToolError

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by its name."""

    name: str
    arguments: Mapping[str, object]


_to_call = msgspec.json.Decoder(ToolCall).decode


def tool_calls(said: str) -> list[ToolCall]:
    """The calls in a policy's message, in order; what is not one by its form is left out.

    Example: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>` gives ToolCall("add", {"a": 1}).
    """
    calls = []
    for text in _CALL.findall(said):
        try:
            calls.append(_to_call(text))
        except msgspec.DecodeError:
            continue  # the policy's mistake: the environment sees that there is no call
    return calls


async def run_tool(tool: Callable[..., object], call: ToolCall) -> str:
    """What a tool answers, as text: JSON unless it is text already.

    Arguments that do not fit the tool are the policy's mistake, and the answer says so. Whatever the tool itself
    raises fails the trajectory.

    Raises:
        ToolError: the tool raised; it names tool and error.
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
