"""The chat loop of the `verifiers` library in this process; the library's `null` harness starts a process a segment.

The module is also the library's plugin, registered under the flat name by which the library finds plugins.
"""

import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from functools import cache
from types import ModuleType
from typing import Any

import httpx
from openai import AsyncOpenAI
from verifiers.v1 import ModelContext, ProgramResult, Runtime, TaskData, Trace

from rollmill.tasks.rollout.environments.verifiers.loading import CHAT_PLUGIN
from rollmill.tasks.rollout.environments.verifiers.private_verifiers import (
    CHAT_PROGRAM_SOURCE,
    NullHarness,
    message_to_wire,
)

__all__ = ["InProcessChat"]

sys.modules.setdefault(CHAT_PLUGIN, sys.modules[__name__])


class InProcessChat(NullHarness):
    """Chat harness that runs in this process, with the loop and tool handling of the library's null harness.

    Unlike the null harness, it starts no process and downloads nothing for a rollout.
    """

    async def setup(self, runtime: Runtime) -> None:
        """Do nothing: a chat in this process needs no preparation."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Run the chat until the policy sends a message without a tool call."""
        program = _program()
        async with AsyncExitStack() as stack:
            # No time limit: the policy's turn takes as long as sampling does, and rollout.env_timeout_s bounds the environment's.
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            policy = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0)
            timeout = self.config.tool_timeout
            urls = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
            tools, dispatch, servers = await program.connect_mcp({"mcpServers": urls}, stack)
            compactor = program.Compactor(policy, ctx.model, tools, False, None)
            messages = self._opening(data)
            compactor.note_good(messages)
            asked = Namespace(
                tool_interception_url=tool_interception_url,
                api_key=secret,
                bash=False,
                edit=False,
                search=False,
            )
            await program.run_chat_loop(asked, compactor, messages, dispatch, servers, http)
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        opening = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or ())]


@cache
def _program() -> ModuleType:
    """Return the library's chat program as a module, compiled from the source text that the library sends to sandboxes."""
    program = ModuleType("verifiers_chat_program")
    exec(compile(CHAT_PROGRAM_SOURCE, "verifiers chat program", "exec"), program.__dict__)
    return program
