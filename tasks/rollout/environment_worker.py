"""Worker process of an environment: answers the requests of environment_messages; it ends at SIGTERM.

The first request has the RolloutConfig as JSON.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from rollmill.tasks.errors import ForeignError, describe_error, error_text
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Environment, Episode, Message, TokenCounts, make_environment
from rollmill.tasks.rollout.environment_calls import (
    EpisodeState,
    read_episode_state,
    report_counts,
    report_cut,
    state_columns,
)
from rollmill.tasks.rollout.environment_messages import (
    ClosedEpisode,
    CloseRequest,
    DescribeRequest,
    EnvironmentDescription,
    ExampleRequest,
    TurnReply,
    TurnRequest,
)
from rollmill.tasks.user_code.concurrent_worker import AsyncHandler, serve_concurrently

Value = TypeVar("Value")

_to_reply = msgspec.json.Decoder(TurnReply).decode
_to_request = msgspec.json.Decoder(DescribeRequest | ExampleRequest | TurnRequest | CloseRequest).decode


def create_environment_handler(settings: bytes) -> AsyncHandler:
    """Create the environment of the JSON settings, and return the function that answers requests to it."""
    environment = make_environment(RolloutConfig.model_validate_json(settings))
    episodes = OpenEpisodes(environment)

    async def answer(body: bytes) -> bytes:
        match _to_request(body):
            case DescribeRequest():
                given: object = EnvironmentDescription(
                    name=environment.name,
                    sizes={"train": environment.size("train"), "held_out": environment.size("held_out")},
                    tools=[dict(tool) for tool in environment.tools],
                    stop=list(environment.stop),
                    states=dict(state_columns(environment)),
                )
            case ExampleRequest(split, index):
                given = await _call_environment(lambda: environment.example(split, index))
            case TurnRequest() as turn:
                given = await episodes.reply(turn)
            case CloseRequest(episode, cut, counts):
                given = await episodes.close(episode, cut, counts)
        return msgspec.json.encode(given)

    return answer


@dataclass(slots=True)
class _OpenEpisode:
    """An open episode, with a lock so that its calls do not overlap."""

    episode: Episode
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OpenEpisodes:
    """The open episodes of a worker; an episode whose turn fails or is cancelled is closed at once."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._open: dict[int, _OpenEpisode] = {}

    async def reply(self, turn: TurnRequest) -> TurnReply:
        """Return the environment's reply in an episode; the first call opens the episode.

        Raises:
            ForeignError: the environment raised, or returned something other than messages.
        """
        try:
            return await _call_environment(lambda: self._reply(turn))
        except BaseException:
            await self.close(turn.episode)
            raise

    async def _reply(self, turn: TurnRequest) -> TurnReply:
        if turn.episode not in self._open:
            self._open[turn.episode] = _OpenEpisode(self._environment.episode(turn.example, turn.seed))
        opened = self._open[turn.episode]
        async with opened.lock:
            report_counts(opened.episode, turn.counts)
            # What cannot be read from its JSON would fail in the flow, after the episode has advanced.
            return _to_reply(msgspec.json.encode(TurnReply.of(await opened.episode.reply(turn.messages))))

    async def close(
        self, number: int, cut: Message | None = None, counts: TokenCounts | None = None
    ) -> ClosedEpisode:
        """Close the episode with this number and return its outcome and state; empty ones if it is not open.

        `cut` is the policy's message that a limit cut, `counts` its token counts; None: no message was cut.
        """
        opened = self._open.pop(number, None)
        if opened is None:
            return ClosedEpisode()
        outcome: Mapping[str, object] = {}
        raised: tuple[str, str] | None = None
        try:
            outcome = await _call_environment(lambda: _close_episode(opened, cut, counts))
        except ForeignError as error:
            raised = describe_error(error)
        state = read_episode_state(self._environment, opened.episode)
        try:
            msgspec.json.encode(state.values)
        except Exception as error:  # noqa: BLE001 - what is written is foreign: RecursionError, say
            state = EpisodeState(error=f"the state is not JSON: {error_text(error)}")
        return ClosedEpisode(outcome, raised, state.values, state.error)


async def _close_episode(
    opened: _OpenEpisode, cut: Message | None, counts: TokenCounts | None
) -> Mapping[str, object]:
    async with opened.lock:
        report_cut(opened.episode, cut, counts)
        return await opened.episode.close()


async def _call_environment(call: Callable[[], Awaitable[Value]]) -> Value:
    """Run the call in a separate task, which user code may cancel, and return its result; its errors become ForeignErrors."""
    async with asyncio.TaskGroup() as calling:
        called = calling.create_task(_catch_errors(call))
    if called.cancelled():
        text = "the environment was cancelled, by itself or by something it waited for"
        raise ForeignError("CancelledError", text)
    value, error = called.result()
    if error is not None:
        raise ForeignError(*describe_error(error)) from error
    return value  # type: ignore[return-value] # None only with an error


async def _catch_errors(call: Callable[[], Awaitable[Value]]) -> tuple[Value | None, BaseException | None]:
    try:
        return await call(), None
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - foreign code: the flow receives SystemExit too
        return None, error


if __name__ == "__main__":
    serve_concurrently(create_environment_handler)
