"""An LLM as a scorer: `judge` grades one trajectory, `ruler` compares those of a group."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import jinja2
import msgspec
from jinja2.sandbox import SandboxedEnvironment

from rollmill.tasks.errors import ConfigError, JudgeUnparsableError, ScoreError
from rollmill.tasks.score.config import JudgeConfig, ScoreConfig
from rollmill.tasks.score.score_function import settings_version
from rollmill.tasks.score.scorer import Candidate, Reward
from rollmill.tasks.score.scorers.model_endpoint import SHOWN_CHARACTERS, Endpoint

Answer = TypeVar("Answer")
JUDGE_PROMPT = """\
Judge the last answer of the assistant in this conversation.

{% for message in messages %}
[{{ message.role }}] {{ message.content }}
{% endfor %}
{% if example.answer is defined %}
Reference answer: {{ example.answer }}
{% endif %}

Reply with one JSON object and nothing else: {"explanation": "one sentence", "score": S}, where S is a number from 0
(useless) to 1 (correct and complete).
"""
END_OF_THOUGHTS = "</think>"
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


class _JudgeMessage(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _JudgeMessage
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_ChatChoice]


class LlmScorer:
    """Base class of the scorers that ask the LLM which the settings `score.judge` name."""

    # A temperature above 0 makes them random, not dependent on earlier calls.
    keeps_state = False

    def __init__(self, config: JudgeConfig, endpoint: Endpoint) -> None:
        self._config, self._endpoint = config, endpoint

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """Create the scorer from settings; raises ConfigError if a setting of score.judge is missing or wrong."""
        judge = config.judge
        if not judge.model:
            raise ConfigError("score.judge.model", "", "give the name of the model that is to judge")
        return cls(judge, Endpoint("score.judge", judge.url, judge.api_key_env, config.timeout_s))

    async def ask(self, prompt: str, kind: type[Answer]) -> Answer:
        """Send one user message to the model and return its answer, JSON of the shape of `kind`.

        Raises:
            JudgeUnparsableError: the answer is no such JSON.
            RequestError: the request failed.
        """
        request = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        completion = await self._endpoint.ask("/chat/completions", request, _ChatCompletion)
        if not completion.choices:
            raise ScoreError("the judge's answer has no choices")
        choice = completion.choices[0]
        if choice.finish_reason == "length":
            remedy = "it needs more than score.judge.max_tokens"
            raise JudgeUnparsableError(
                f"the judge's answer was cut after {self._config.max_tokens} tokens: {remedy}"
            )
        return parse_answer(choice.message.content or "", kind)

    async def close(self) -> None:
        """Close the HTTP connections to the LLM."""
        await self._endpoint.close()


def parse_answer(content: str, kind: type[Answer]) -> Answer:
    r"""Parse an answer that is one JSON value of the shape of `kind`, possibly after thoughts and in a code fence.

    Thoughts end with `</think>`; a chat template may have opened them in the prompt.

    Example: '<think>hm</think>```json\n{"score": 1}```' is {"score": 1}; 'I say {"score": 1}' is an error.

    Raises:
        JudgeUnparsableError: it is anything else.
    """
    _, end, after = content.partition(END_OF_THOUGHTS)
    if end:
        # An answer may have the word inside a text; it is then read as a whole below.
        with suppress(msgspec.DecodeError, UnicodeError):
            return _decode_json(after, kind)
    try:
        return _decode_json(content, kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        shown = content[:SHOWN_CHARACTERS]
        raise JudgeUnparsableError(
            f"expected one JSON object from the judge ({error}), got {shown!r}"
        ) from None


def _decode_json(text: str, kind: type[Answer]) -> Answer:
    match = _FENCED.fullmatch(text)
    return msgspec.json.decode(match[1] if match else text, type=kind)


class Judgement(msgspec.Struct):
    """JSON object that the scorer `judge` expects from the LLM; other fields are ignored."""

    score: float


class Judge(LlmScorer):
    """Scorer that grades a trajectory with an LLM, using a prompt template from the settings.

    The scorer's version is a digest of model, prompt, temperature and range, so that scores of different judges never mix.
    """

    name = "judge"

    def __init__(self, config: JudgeConfig, endpoint: Endpoint) -> None:
        super().__init__(config, endpoint)
        text = read_prompt(config)
        self._prompt = compile_prompt(text, config.prompt_file)
        self.version = settings_version([config.model, text, config.temperature, *config.score_range])

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """Create the scorer from settings; raises ConfigError as `LlmScorer` does, and if the range of scores is empty."""
        lowest, highest = config.judge.score_range
        if lowest >= highest:
            remedy = "give the smallest score first, then a larger one"
            raise ConfigError("score.judge.score_range", [lowest, highest], remedy)
        return super().from_config(config)

    async def score(self, candidate: Candidate) -> Reward:
        prompt = self._prompt.render(
            messages=candidate.messages,
            answer=candidate.answer,
            example=candidate.example,
            outcome=candidate.outcome,
            env=candidate.env,
        )
        score = (await self.ask(prompt, Judgement)).score
        lowest, highest = self._config.score_range
        if not lowest <= score <= highest:
            raise JudgeUnparsableError(f"expected a score from {lowest:g} to {highest:g}, got {score:g}")
        return Reward(score)


def read_prompt(config: JudgeConfig) -> str:
    """Return the judge's prompt template, from the file that the settings name or the general one; raises ConfigError if it is unreadable."""
    if not config.prompt_file:
        return JUDGE_PROMPT
    try:
        return Path(config.prompt_file).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "score.judge.prompt_file", config.prompt_file, f"cannot be read: {error}"
        ) from error


def compile_prompt(text: str, file: str) -> jinja2.Template:
    """Compile a Jinja template of the judge's prompt, read from `file`; raises ConfigError if it is invalid.

    Rendering the template raises an error for an unknown name.
    """
    # Sandboxed: a template comes from the settings, and renders what the policy wrote. Strict: a misspelt name would
    # otherwise be empty in every prompt.
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        remedy = f"not a Jinja template: line {error.lineno}: {error.message}"
        raise ConfigError("score.judge.prompt_file", file, remedy) from error


# RULER, "relative universal LLM-elicited rewards" (OpenPipe, 2025): comparing attempts is easier for a judge than grading one, the
# advantage needs only the comparison, and a general rubric works for most tasks.
_RANKING_TASK = """\
Several attempts were made at the same task. Compare them, and give each a score from 0 to 1 by these rules:
"""
_RANKING_FORM = """\
Reply with one JSON object and nothing else, in which each attempt occurs once:
{"attempts": [{"attempt": 1, "explanation": "one sentence", "score": S}, ...]}, where S is a number from 0 to 1.
"""


class AttemptScore(msgspec.Struct):
    """The LLM's score of one attempt in a prompt of `ruler`; attempts are numbered from 1."""

    attempt: int
    score: float


class Ranking(msgspec.Struct):
    """JSON object that the scorer `ruler` expects from the LLM: its scores of all attempts."""

    attempts: list[AttemptScore]


class Ruler(LlmScorer):
    """Scorer that grades all trajectories of a group from 0 to 1 with one call of an LLM.

    The scorer's version is a digest of model, rubric and temperature.
    """

    name = "ruler"
    by_group = True

    def __init__(self, config: JudgeConfig, endpoint: Endpoint) -> None:
        super().__init__(config, endpoint)
        self.version = settings_version([config.model, config.rubric, config.temperature])

    async def score(self, candidates: Sequence[Candidate]) -> list[Reward]:
        prompt = ranking_prompt(self._config.rubric, [candidate.messages for candidate in candidates])
        ranking = await self.ask(prompt, Ranking)
        return [Reward(score) for score in scores_from_ranking(ranking, len(candidates))]


def ranking_prompt(rubric: str, attempts: Sequence[Sequence[Mapping[str, str]]]) -> str:
    """Build the prompt of `ruler`: the rubric, the messages that all attempts share, then the rest of each attempt."""
    n_shared = count_shared_messages(attempts)
    parts = [_RANKING_TASK, rubric]
    if n_shared:
        parts.append(
            f"All attempts begin with these messages:\n{_messages_as_json(attempts[0][:n_shared])}\n"
        )
    parts += [
        f"Attempt {number}:\n{_messages_as_json(messages[n_shared:])}\n"
        for number, messages in enumerate(attempts, start=1)
    ]
    return "\n".join([*parts, _RANKING_FORM])


def count_shared_messages(attempts: Sequence[Sequence[Mapping[str, str]]]) -> int:
    """Count the messages that all attempts begin with; the last message of an attempt is never counted.

    Example: [q, a], [q, b] and [q, a, c] share 1.
    """
    first, longest = attempts[0], min(len(messages) for messages in attempts) - 1
    for number in range(longest):
        if any(messages[number] != first[number] for messages in attempts):
            return number
    return max(0, longest)


def scores_from_ranking(ranking: Ranking, n: int) -> list[float]:
    """Return the LLM's scores in the order of the attempts, 1 to `n`.

    Raises:
        JudgeUnparsableError: an attempt is missing or occurs twice, or a score is not from 0 to 1.
    """
    numbers = sorted(each.attempt for each in ranking.attempts)
    if numbers != list(range(1, n + 1)):
        raise JudgeUnparsableError(f"expected each of the attempts 1 to {n} once, got {numbers}")
    if wrong := [each.score for each in ranking.attempts if not 0.0 <= each.score <= 1.0]:
        raise JudgeUnparsableError(f"expected scores from 0 to 1, got {wrong[0]:g}")
    return [each.score for each in sorted(ranking.attempts, key=lambda each: each.attempt)]


def _messages_as_json(messages: Sequence[Mapping[str, str]]) -> str:
    return json.dumps([dict(message) for message in messages], ensure_ascii=False)
