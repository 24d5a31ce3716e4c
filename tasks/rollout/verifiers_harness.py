"""The chat loop of the `verifiers` library in this process; the library's own `null` harness starts a process a segment.

The module is also the plugin by which the library finds it, under the flat name that it looks plugins up by.
"""

import sys
from argparse import Namespace
from contextlib import AsyncExitStack
from functools import cache
from types import ModuleType
from typing import Any

import httpx
from openai import AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["InProcessChat"]

PLUGIN = "rollmill_chat"
sys.modules.setdefault(PLUGIN, sys.modules[__name__])


class InProcessChat(NullHarness):
    """The program of the null harness, as a coroutine: same loop, same treatment of tools, no process, no download."""

    async def setup(self, runtime: Runtime) -> None:
        """Nothing has to be prepared."""

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
        """Talk until the policy says something without calling a tool."""
        program = _program()
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            policy = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0)
            tools, dispatch, servers = await program.connect_mcp(_servers(mcp_urls, self.config), stack)
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


def _servers(urls: dict[str, str], config: HarnessConfig) -> dict[str, Any]:
    return {"mcpServers": {name: {"url": url, "timeout": config.tool_timeout} for name, url in urls.items()}}


@cache
def _program() -> ModuleType:
    """The library's chat program, which it has as one source text to be sent into sandboxes."""
    program = ModuleType("verifiers_chat_program")
    exec(compile(CHAT_PROGRAM_SOURCE, "verifiers chat program", "exec"), program.__dict__)
    return program
