"""An environment and a scorer that return the environment variables of their process, as code that a model wrote could."""

import json
import os
from collections.abc import Mapping, Sequence

from rollmill.tasks.rollout.environment import Example, Message, Split
from rollmill.tasks.score.scorer import Candidate, Reward


class Variables:
    """An environment whose opening message has all variables as JSON."""

    name = "variables"
    tools: Sequence[Mapping[str, object]] = ()
    stop: Sequence[str] = ()

    def size(self, split: Split) -> int:
        return 1

    async def example(self, split: Split, index: int) -> Example:
        return Example("0", {})

    def episode(self, example: Example, seed: int) -> "Episode":
        return Episode()


class Episode:
    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return (Message("user", json.dumps(dict(os.environ))),)

    async def close(self) -> Mapping[str, object]:
        return {}


def score(candidate: Candidate) -> Reward:
    """Return a component for each variable."""
    return Reward(0.0, dict.fromkeys(os.environ, 1.0))
