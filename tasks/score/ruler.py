"""An LLM that ranks the trajectories of a group against each other: RULER, "relative universal LLM-elicited rewards".

OpenPipe, 2025. To compare attempts is easier for a judge than to grade one, and the advantage needs no more than
the comparison; a general rubric does for most tasks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from tasks.errors import JudgeUnparsableError
from tasks.score.chat import JudgeModel
from tasks.score.config import JudgeConfig, ScoreConfig
from tasks.score.function import digest_of
from tasks.score.judge import Model
from tasks.score.scorer import Candidate, Reward

_TASK = """\
Several attempts were made at the same task. Compare them, and give each a score from 0 to 1 by these rules:
"""
_FORM = """\
Reply with one JSON object and nothing else, in which each attempt occurs once:
{"attempts": [{"attempt": 1, "explanation": "one sentence", "score": S}, ...]}, where S is a number from 0 to 1.
"""

Messages = Sequence[Mapping[str, str]]


class AttemptScore(msgspec.Struct):
    """What `ruler` is told of one attempt."""

    attempt: int
    score: float


class Ranking(msgspec.Struct):
    """What `ruler` is told of all attempts."""

    attempts: list[AttemptScore]


class Ruler:
    """Scores from 0 to 1 of a group's trajectories, from one call with all of them.

    Its version is a digest of model, rubric and temperature.
    """

    name = "ruler"
    by_group = True

    def __init__(self, config: JudgeConfig, model: Model) -> None:
        self._config, self._model = config, model
        self.version = digest_of([config.model, config.rubric, config.temperature])

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """ConfigError when a setting of score.judge is missing or wrong."""
        return cls(config.judge, JudgeModel.from_config(config.judge))

    async def score(self, candidates: Sequence[Candidate]) -> list[Reward]:
        prompt = ranking_prompt(self._config.rubric, [candidate.messages for candidate in candidates])
        ranking = await self._model.ask(prompt, Ranking)
        return [Reward(score) for score in scores_of(ranking, len(candidates))]

    async def close(self) -> None:
        """Close the connections."""
        await self._model.close()


def ranking_prompt(rubric: str, attempts: Sequence[Messages]) -> str:
    """What the judge is asked: the messages that all attempts begin with once, then each attempt's own."""
    n_shared = shared_messages(attempts)
    parts = [_TASK, rubric]
    if n_shared:
        parts.append(f"All attempts begin with these messages:\n{_text(attempts[0][:n_shared])}\n")
    parts += [
        f"Attempt {number}:\n{_text(messages[n_shared:])}\n"
        for number, messages in enumerate(attempts, start=1)
    ]
    return "\n".join([*parts, _FORM])


def shared_messages(attempts: Sequence[Messages]) -> int:
    """How many messages all attempts begin with; at least the last one of each is its own.

    Example: [q, a], [q, b] and [q, a, c] share 1.
    """
    first, longest = attempts[0], min(len(messages) for messages in attempts) - 1
    for number in range(longest):
        if any(messages[number] != first[number] for messages in attempts):
            return number
    return max(0, longest)


def scores_of(ranking: Ranking, n: int) -> list[float]:
    """The scores of attempts 1 to n.

    Raises:
        JudgeUnparsableError: one is missing, occurs twice, or is not from 0 to 1.
    """
    numbers = sorted(each.attempt for each in ranking.attempts)
    if numbers != list(range(1, n + 1)):
        raise JudgeUnparsableError(f"expected each of the attempts 1 to {n} once, got {numbers}")
    if wrong := [each.score for each in ranking.attempts if not 0.0 <= each.score <= 1.0]:
        raise JudgeUnparsableError(f"expected scores from 0 to 1, got {wrong[0]:g}")
    return [each.score for each in sorted(ranking.attempts, key=lambda each: each.attempt)]


def _text(messages: Messages) -> str:
    return json.dumps([dict(message) for message in messages], ensure_ascii=False)
