"""An episode that an environment of the `verifiers` library plays itself, turned into replies.

The environment's own rollout runs as one task. Where it asks for a completion, `reply` returns what is new in its
conversation, and the policy's next message, which the flow samples, becomes that completion.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from tasks.errors import EpisodeError
from tasks.rollout.environment import Message
from tasks.rollout.verifiers_wire import Wire, assistant_of, message_of, new_messages, refuse_settings

CUT = "maximum context length is reached: the policy's turns are over"
"""What ends a rollout in order: for the library's harnesses a full context is the end of a budget, not an error."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How an environment's rollout ended.

    Attributes:
        outcome: reward, its parts and metrics.
        error: what went wrong before the environment could score it, empty when nothing did.
        state: what is kept of the library's state of the rollout.
    """

    outcome: Mapping[str, object]
    error: str = ""
    state: Mapping[str, object] = field(default_factory=dict)


class Play(Protocol):
    """Runs the environment's rollout to its end."""

    def __call__(self, asked: Callable[[str, Wire], Awaitable[Wire]]) -> Awaitable[Finished]:
        """Run it; every request of it, with the id of its trace, is put to `asked`."""


class VerifiersEpisode:
    """The policy's side of one rollout.

    Args:
        play: runs the rollout.
        tools: what the chat template was told the policy may call; None: whatever the environment has.
    """

    def __init__(self, play: Play, tools: Sequence[Wire] | None) -> None:
        self._play, self.tools = play, tools
        self._conversation: list[Wire] = []
        self._trace = ""
        self._turn = 0
        self._run: asyncio.Task[Finished] | None = None
        self._asked: asyncio.Future[Sequence[Message]] = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[Wire] | None = None

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the environment adds to the conversation; () when its rollout, scoring included, is over.

        Raises:
            EpisodeError: the environment failed, or asked for what one conversation of one policy cannot give.
        """
        if self._run is None:
            self._run = asyncio.create_task(self._played())
        elif self._answer is not None and not self._answer.done():
            said = assistant_of(messages[-1].content, self._turn)
            self._conversation.append(said)
            self._asked = asyncio.get_running_loop().create_future()
            self._turn += 1
            self._answer.set_result(said)
        await asyncio.wait((self._run, self._asked), return_when=asyncio.FIRST_COMPLETED)
        if self._asked.done():
            return self._asked.result()
        finished = self._run.result()
        if finished.error:
            raise EpisodeError(finished.error)
        return ()

    async def close(self) -> Mapping[str, object]:
        """End the rollout; returns how the environment scored it: reward, rewards by name, metrics, stop, version.

        A rollout that waits for the policy is told that its turns are over, and scored as it stands. One that the
        environment could not score has an `error` instead of a reward.
        """
        if self._run is None:
            return {}
        try:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(EpisodeError(CUT))
            elif not self._run.done():
                return {"error": "the rollout was cut in the environment's own turn"}
            await asyncio.wait({self._run})
            finished = self._run.result()
            return {**finished.outcome, **({"error": finished.error} if finished.error else {})}
        finally:
            await self._ended(self._run)

    def state(self) -> Mapping[str, object]:
        """What is kept of a rollout that came to its end; nothing of one that failed or was cut."""
        run = self._run
        if run is None or not run.done() or run.cancelled() or run.exception() is not None:
            return {}
        return run.result().state

    async def _ended(self, run: asyncio.Task[Finished]) -> None:
        run.cancel()
        with suppress(asyncio.CancelledError, Exception):  # `reply` and `close` have told what it raised
            await run

    async def _played(self) -> Finished:
        return await self._play(self._ask)

    async def _ask(self, trace: str, request: Wire) -> Wire:
        try:
            self._check(trace, request)
            new = new_messages(self._conversation, request["messages"])
            if not new:
                raise EpisodeError("the environment asks for a second message of the policy after the first")
            said = tuple(message_of(each) for each in new)
        except EpisodeError as error:
            if not self._asked.done():
                self._asked.set_exception(error)
            raise
        self._conversation = list(request["messages"])
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.set_result(said)
        return await self._answer

    def _check(self, trace: str, request: Wire) -> None:
        if self._answer is not None and not self._answer.done():
            raise EpisodeError("the environment asks for two completions at the same time")
        if self._trace not in ("", trace):
            raise EpisodeError(
                "the environment has the policy play more than one role; a trajectory is one conversation"
            )
        self._trace = trace
        refuse_settings(request)
        tools = request.get("tools") or []
        if self.tools is None:
            self.tools = tools
        if list(self.tools) != list(tools):
            raise EpisodeError(
                f"the environment has other tools in this episode: {_names(tools)}, "
                f"the chat template was told {_names(self.tools)}"
            )


def _names(tools: Sequence[Wire]) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]
