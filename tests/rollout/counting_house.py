"""A task set of the verifiers library: sums, alone or with a till to ring up coins at, and ways to misbehave.

The library finds it as the plugin `counting_house`, and starts its tool server with `python -m counting_house`.
"""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["CountingHouse", "House"]


class Sum(vf.TaskData):
    answer: str
    misbehave: str = ""


class Coins(vf.State):
    rung_up: int = 0


class TillConfig(vf.ToolsetConfig):
    pass


class Till(vf.Toolset[TillConfig, Coins]):
    @vf.tool
    def ring_up(self, coins: int) -> str:
        """Add coins to the till."""
        if coins < 0:
            raise ValueError("the till takes coins, it gives none")
        self.state.rung_up += coins
        return f"{self.state.rung_up} in the till"


class SumTaskConfig(vf.TaskConfig):
    has_till: bool = False


class HouseConfig(vf.TasksetConfig):
    n: int = 10
    misbehave: str = ""
    task: SumTaskConfig = SumTaskConfig()


class SumTask(vf.Task[Sum, Coins, SumTaskConfig]):
    @classmethod
    def toolsets(cls, config: SumTaskConfig) -> list[vf.Toolset]:
        return [Till(TillConfig())] if config.has_till else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.misbehave == "setup":
            raise RuntimeError("the house is closed")

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.misbehave == "scoring":
            raise RuntimeError("the judge is out")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def in_the_till(self, trace: vf.Trace) -> float:
        return float(trace.state.rung_up)


class CountingHouse(vf.Taskset[SumTask, HouseConfig]):
    def load(self) -> Iterator[SumTask]:
        for i in range(self.config.n):
            data = Sum(prompt=f"{i}+1=", answer=str(i + 1), misbehave=self.config.misbehave)
            yield SumTask(data, self.config.task)


class HouseEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class House(vf.Env[HouseEnvConfig]):
    """Asks once; a misbehaving one asks again, plays two roles, or never ends its turn."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        misbehave = task.data.misbehave
        if misbehave == "second role":
            await agents.agent.run(task)
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if misbehave == "broken":
                raise RuntimeError("the counter fell over")
            if misbehave == "hanging":
                import asyncio

                await asyncio.Event().wait()
            while not segment.terminated and segment.last_reply == "again":
                segment = await interaction.turn("and now?")


if __name__ == "__main__":
    Till.run()
