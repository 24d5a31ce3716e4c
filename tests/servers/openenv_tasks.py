"""Task servers made with OpenEnv's own server code: `uvicorn openenv_tasks:guess` and `uvicorn openenv_tasks:shop`."""

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    text: str = ""


class GuessingGame(Environment[Guess, Hint, State]):
    """The number is the seed; a wrong guess costs 0.25, the right one ends the episode with 1, the number 99 breaks it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Hint:
        self._secret = seed or 0
        return Hint(text=f"guess, {given['player']}" if "player" in given else "guess")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number == 99:
            raise ValueError("the game is broken")
        if action.number == self._secret:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="more" if action.number < self._secret else "less", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


class Said(Action):
    message: str


class Echo(Environment[Said, Hint, State]):
    """It repeats the message; no reward, and no end."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        return Hint(text="speak")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Hint:
        return Hint(text=f"you said {action.message}")

    @property
    def state(self) -> State:
        return State()


class Digits(Environment[Said, Hint, State]):
    """Two messages, each worth a tenth for every digit that it has."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._n_left = 2

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._n_left = 2
        return Hint(text=f"{seed}+1=")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Hint:
        self._n_left -= 1
        reward = len({each for each in action.message if each.isdigit()}) / 10
        return Hint(text="+1=", reward=reward, done=not self._n_left)

    @property
    def state(self) -> State:
        return State()


class Shop(MCPEnvironment):
    """Its tools are those of a server of the Model Context Protocol; a price is worth a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("shop")

        @server.tool
        def price(fruit: str) -> str:
            """Price of a fruit."""
            return {"apple": "3", "pear": "4"}[fruit]

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Hint(text="what does an apple cost?")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools")

    async def step_async(self, action: Action, timeout_s: float | None = None, **further: Any) -> Observation:
        seen = await super().step_async(action, timeout_s, **further)
        assert isinstance(seen, CallToolObservation)
        return seen.model_copy(update={"reward": float(seen.error is None)})

    @property
    def state(self) -> State:
        return State()


guess = create_app(GuessingGame, Guess, Hint, max_concurrent_envs=2)
echo = create_app(Echo, Said, Hint, max_concurrent_envs=2)
digits = create_app(Digits, Said, Hint, max_concurrent_envs=8)
shop = create_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=2)
