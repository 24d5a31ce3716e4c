"""An agent of pydantic-ai with a tool: the library runs the loop of calls and answers, and streams each completion."""

import asyncio
import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(OpenAIChatModel("policy", provider=provider))


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    problem = json.load(sys.stdin)[-1]["content"]
    async with agent.run_stream(problem) as result:
        print(await result.get_output())


asyncio.run(main())
