"""Environments whose trajectories have several segments: one compacts its context, one calls a sub-agent, one rewrites messages.

All ask for sums of two-digit numbers, as `addition` does, and reward the share of right answers.
"""

import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from rollmill.tasks.rollout.environment import Conversation, Example, Message
from rollmill.tasks.rollout.environments.addition import Addition

N_ROUNDS = 3


def last_number(text: str) -> int | None:
    """The number at the end of an answer, below 90 so that another may be added to it."""
    found = re.search(r"(\d{1,4})$", text.strip())
    return int(found[1]) % 90 if found else None


class Asking:
    """Asks for a sum and notes whether the answer is right."""

    def __init__(self, example: Example, seed: int) -> None:
        a, b = re.findall(r"\d+", str(example.content["problem"]))
        self.numbers, self.random = (int(a), int(b)), np.random.default_rng(seed)
        self.n_asked = self.n_right = 0
        self.answer = 0

    def ask(self, a: int, b: int) -> Message:
        self.n_asked += 1
        self.answer = a + b
        return Message("user", f"{a}+{b}=")

    def take(self, messages: Sequence[Message]) -> int:
        """Note the policy's last answer; returns it as a number that may be added to."""
        text = messages[-1].content
        self.n_right += text.endswith(str(self.answer))
        return last_number(text) or 10

    def draw(self) -> int:
        return int(self.random.integers(10, 100))

    async def close(self) -> Mapping[str, object]:
        return {"reward": self.n_right / max(1, self.n_asked)}


class CompactingEpisode(Asking):
    """Keeps the last result alone of what was said: each question is a new conversation."""

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if not messages:
            return (self.ask(*self.numbers),)
        result = self.take(messages)
        return () if self.n_asked == N_ROUNDS else Conversation((self.ask(result, self.draw()),))


class SubAgentEpisode(Asking):
    """Lets a sub-agent answer a second question, and adds its result to the first one's in the main conversation."""

    def __init__(self, example: Example, seed: int) -> None:
        super().__init__(example, seed)
        self.main: tuple[Message, ...] = ()
        self.result = 0

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if not messages:
            return (self.ask(*self.numbers),)
        result = self.take(messages)
        if self.n_asked == 1:
            self.main, self.result = tuple(messages), result
            return Conversation((self.ask(self.draw(), self.draw()),))
        if self.n_asked == 2:
            return Conversation((*self.main, self.ask(self.result, result)))
        return ()


class RewritingEpisode(Asking):
    """Writes its second question over the first one, and the third over the policy's second answer."""

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if not messages:
            return (self.ask(*self.numbers),)
        result = self.take(messages)
        if self.n_asked == 1:
            # Other words in the place of the first question, whose first digit stays.
            return Conversation((self.ask(self.numbers[0], self.draw()),))
        if self.n_asked == 2:
            return Conversation((*messages[:-1], Message("assistant", f"0{result}"), self.ask(result, 10)))
        return ()


class Segments(Addition):
    """A third of its problems compact, call a sub-agent, and rewrite; the reward is of the answers' letters, so that any policy has spread."""

    name = "segments"

    def episode(self, example: Example, seed: int) -> Asking:
        kinds = (LetteredCompacting, LetteredSubAgent, LetteredRewriting)
        return kinds[zlib.crc32(example.example_id.encode()) % len(kinds)](example, seed)


class Lettered(Asking):
    """Rewards the letters of the answers instead of the sums."""

    n_letters = 0

    def take(self, messages: Sequence[Message]) -> int:
        self.n_letters += sum(messages[-1].content.encode())
        return super().take(messages)

    async def close(self) -> Mapping[str, object]:
        return {"reward": self.n_letters % 7 / 7}


class LetteredCompacting(Lettered, CompactingEpisode):
    pass


class LetteredSubAgent(Lettered, SubAgentEpisode):
    pass


class LetteredRewriting(Lettered, RewritingEpisode):
    pass


class Compacting(Addition):
    name = "compacting"

    def episode(self, example: Example, seed: int) -> CompactingEpisode:
        return CompactingEpisode(example, seed)


class SubAgent(Addition):
    name = "sub_agent"

    def episode(self, example: Example, seed: int) -> SubAgentEpisode:
        return SubAgentEpisode(example, seed)


class Rewriting(Addition):
    name = "rewriting"

    def episode(self, example: Example, seed: int) -> RewritingEpisode:
        return RewritingEpisode(example, seed)
