"""An episode that somebody else's program plays by requests for completions, presented as replies.

The program runs as one task. When it requests a completion, `reply` returns the new messages of its conversation, or the whole
conversation if the request does not begin with the one so far. The flow samples the policy's next message, which becomes
the completion.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environment import Conversation, Message, TokenCounts
from rollmill.tasks.rollout.environments.endpoint.chat_wire import (
    Said,
    Wire,
    assistant_message,
    continues,
    is_same_message,
    message_from_wire,
    refuse_sampling_settings,
)

# Ends a rollout without an error: the library's harnesses treat a full context as the end of a budget.
CONTEXT_FULL = "maximum context length is reached: the policy's turns are over"

CLOSE_S = 2.0
"""Seconds in which an agent may end by itself; ending it takes another second or two, and an episode has five to close."""


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How a program ended: its outcome, its error, and the state that is kept.

    Attributes:
        outcome: JSON values that a scorer may read.
        error: what failed before the program had an outcome; empty if nothing did.
        state: values by column of the environment's `states`.
    """

    outcome: Mapping[str, object]
    error: str = ""
    state: Mapping[str, object] = field(default_factory=dict)


AskPolicy: TypeAlias = Callable[[str, Wire], Awaitable[Said]]
"""Called with the id of a conversation's policy and each request; returns the policy's message."""

PlayRollout: TypeAlias = Callable[[AskPolicy], Coroutine[Any, Any, RolloutEnd]]
"""Runs the program to its end."""


class RequestingEpisode:
    """Episode of a program that requests each completion of the policy.

    Args:
        play: runs the program to its end.
        tools: the tools that the chat template lists; None: those of the first request.
        is_agent: True for a program that was not written for this: its requests may have other tools, which its conversation then has, a
            request that cannot be answered is refused without ending the episode, and it has CLOSE_S seconds to end.
    """

    def __init__(self, play: PlayRollout, tools: Sequence[Wire] | None, *, is_agent: bool = False) -> None:
        self._play, self.tools, self._is_agent = play, tools, is_agent
        self._conversation: list[Wire] = []
        self._said: list[tuple[int, Wire, Message]] = []
        self._trace = ""
        self._turn = 0
        self._run: asyncio.Task[RolloutEnd] | None = None
        self._asked: asyncio.Future[Sequence[Message] | Conversation] = (
            asyncio.get_running_loop().create_future()
        )
        self._answer: asyncio.Future[Said] | None = None
        self._counts = TokenCounts(0, 0)
        # Cleared while the policy is sampled, also for a client that has given up.
        self._is_free = asyncio.Event()
        self._is_free.set()
        self._is_over = False

    def take_counts(self, counts: TokenCounts) -> None:
        """Take the token counts of the policy's next message, for the answer to the program."""
        self._counts = counts

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        """Return what the program adds to the conversation or replaces it by; () when it has ended.

        Raises:
            EpisodeError: the program failed, or made a request that one conversation of one policy cannot answer.
        """
        if self._run is None:
            self._run = asyncio.create_task(self._play(self._ask))
        elif self._answer is not None:
            said = assistant_message(messages[-1].content, self._turn)
            self._said.append((len(self._conversation), said, messages[-1]))
            self._conversation.append(said)
            self._asked = asyncio.get_running_loop().create_future()
            self._turn += 1
            # A client that gave up waiting, and may ask again, gets no answer.
            if not self._answer.done():
                self._answer.set_result(Said(said, self._counts))
            self._is_free.set()
        await asyncio.wait((self._run, self._asked), return_when=asyncio.FIRST_COMPLETED)
        if self._asked.done():
            return self._asked.result()
        finished = self._run.result()
        if finished.error:
            raise EpisodeError(finished.error)
        return ()

    async def close(self) -> Mapping[str, object]:
        """End the program and return its outcome.

        One that waits for the policy gets the error that its context is full, and may end by itself. If it failed, the outcome has `error`.
        """
        if self._run is None:
            return {}
        self._is_over = True
        self._is_free.set()
        try:
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(EpisodeError(CONTEXT_FULL))
            elif not self._run.done():
                return {"error": "cancelled during the environment's turn"}
            ended, _ = await asyncio.wait({self._run}, timeout=CLOSE_S if self._is_agent else None)
            if not ended:
                return {"error": f"the agent did not end within {CLOSE_S:g} s of its last turn"}
            finished = self._run.result()
            return {**finished.outcome, **({"error": finished.error} if finished.error else {})}
        finally:
            self._run.cancel()
            # `reply` and the code above report its error.
            with suppress(asyncio.CancelledError, Exception):
                await self._run

    def state(self) -> Mapping[str, object]:
        """Return the kept state of a rollout that ended; empty if it failed or was cancelled."""
        run = self._run
        if run is None or not run.done() or run.cancelled() or run.exception() is not None:
            return {}
        return run.result().state

    async def _ask(self, trace: str, request: Wire) -> Said:
        try:
            self._check(trace, request)
            if not self._is_free.is_set():
                await self._is_free.wait()
                self._check(trace, request)
            reply = self._read(request["messages"], list(request.get("tools") or ()))
        except EpisodeError as error:
            if not self._is_agent and not self._asked.done():
                self._asked.set_exception(error)
            raise
        self._conversation = list(request["messages"])
        self._answer = asyncio.get_running_loop().create_future()
        self._is_free.clear()
        self._asked.set_result(reply)
        return await self._answer

    def _read(self, now: Sequence[Wire], tools: Sequence[Wire]) -> Sequence[Message] | Conversation:
        """Return what a request adds to the conversation, or all of it if it does not begin with it or has other tools."""
        before, messages = self._conversation, tuple(self._restore(*each) for each in enumerate(now))
        has_other_tools = self._is_agent and list(self.tools or ()) != tools
        self.tools = tools if self._is_agent else self.tools
        if has_other_tools or not continues(before, now):
            return Conversation(messages, self.tools if self._is_agent else None)
        if len(now) == len(before):
            raise EpisodeError("the environment asks for a second message of the policy after the first")
        return messages[len(before) :]

    def _restore(self, place: int, wire: Wire) -> Message:
        """Convert the message at a place of a conversation; one that the policy said has the text that was sampled.

        Of several with the same text and calls, which may differ in reasoning, it is the one said at this place, otherwise the last one.
        """
        said = [(at == place, each) for at, known, each in self._said if is_same_message(known, wire)]
        return max(reversed(said), key=lambda each: each[0])[1] if said else message_from_wire(wire)

    def _check(self, trace: str, request: Wire) -> None:
        if self._is_over:
            raise EpisodeError(CONTEXT_FULL)
        if self._answer is not None and not self._answer.done():
            raise EpisodeError("the environment asks for two completions at the same time")
        if self._trace not in ("", trace):
            raise EpisodeError(
                "the environment has the policy play more than one role; a trajectory is one conversation"
            )
        self._trace = trace
        refuse_sampling_settings(request)
        tools = request.get("tools") or []
        if self.tools is None and not self._is_agent:
            self.tools = tools
        if not self._is_agent and list(self.tools or ()) != list(tools):
            raise EpisodeError(
                f"the environment has other tools in this episode: {_tool_names(tools)}, "
                f"the chat template lists {_tool_names(self.tools or ())}"
            )


def _tool_names(tools: Sequence[Wire]) -> list[str]:
    return [str(tool["function"]["name"]) for tool in tools]
