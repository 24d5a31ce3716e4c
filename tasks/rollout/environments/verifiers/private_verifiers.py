"""Every use of what the `verifiers` library has and does not export. Seen in verifiers 0.4.0.

| not exported | for | without it |
|---|---|---|
| `harnesses.null.NullHarness` | the base of the chat in this process | no environment of the library can be played |
| `harnesses.utils.launch.CHAT_PROGRAM_SOURCE` | the library's chat loop and its tool calls | the same |
| `dialects.chat.message_to_wire` | the opening messages of a chat | the same |
| `configs.agent.agent_config_fields` | which agents of an environment have no harness | the same |

Import it inside functions: the library takes seconds.
"""

from importlib.metadata import version

from rollmill.tasks.errors import LibraryError

SEEN_IN = "0.4.0"

try:
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
except ImportError as error:
    raise LibraryError("verifiers", version("verifiers"), SEEN_IN, str(error)) from error

__all__ = ["CHAT_PROGRAM_SOURCE", "NullHarness", "agent_config_fields", "message_to_wire"]
