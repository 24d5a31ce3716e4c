"""A judging LLM behind OpenAI's chat completions, whose answers are JSON."""

import re
from contextlib import suppress
from typing import Self, TypeVar

import msgspec

from tasks.errors import ConfigError, JudgeUnparsableError, ScoreError
from tasks.score.config import JudgeConfig
from tasks.score.endpoint import SHOWN_CHARACTERS, Endpoint

Answer = TypeVar("Answer")
END_OF_THOUGHTS = "</think>"
_FENCED = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class JudgeModel:
    """Asks the model of `score.judge`."""

    def __init__(self, config: JudgeConfig, endpoint: Endpoint) -> None:
        self._config, self._endpoint = config, endpoint

    @classmethod
    def from_config(cls, config: JudgeConfig) -> Self:
        """ConfigError when the settings do not say where it is."""
        if not config.model:
            raise ConfigError("score.judge.model", "", "give the name of the model that is to judge")
        return cls(config, Endpoint("score.judge", config.url, config))

    async def ask(self, prompt: str, kind: type[Answer]) -> Answer:
        """Its answer to one user message, as JSON of the shape of `kind`.

        Raises:
            JudgeUnparsableError: the answer is not such JSON.
            RequestError: there was none.
        """
        request = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        completion = await self._endpoint.ask("/chat/completions", request, _Completion)
        if not completion.choices:
            raise ScoreError("the judge's answer has no choices")
        choice = completion.choices[0]
        if choice.finish_reason == "length":
            remedy = "it needs more than score.judge.max_tokens"
            raise JudgeUnparsableError(
                f"the judge's answer was cut after {self._config.max_tokens} tokens: {remedy}"
            )
        return parsed(choice.message.content or "", kind)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def parsed(content: str, kind: type[Answer]) -> Answer:
    r"""An answer that is one JSON value of the shape of `kind`, after its thoughts and in a code fence or not.

    Thoughts end with `</think>`; a chat template may have opened them in the prompt.

    Example: '<think>hm</think>```json\n{"score": 1}```' is {"score": 1}; 'I say {"score": 1}' is an error.

    Raises:
        JudgeUnparsableError: it is anything else.
    """
    _, end, after = content.partition(END_OF_THOUGHTS)
    if end:
        with suppress(
            msgspec.DecodeError, UnicodeError
        ):  # an answer that has the word inside: read as a whole below
            return _decoded(after, kind)
    try:
        return _decoded(content, kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        shown = content[:SHOWN_CHARACTERS]
        raise JudgeUnparsableError(
            f"expected one JSON object from the judge ({error}), got {shown!r}"
        ) from None


def _decoded(text: str, kind: type[Answer]) -> Answer:
    match = _FENCED.fullmatch(text)
    return msgspec.json.decode(match[1] if match else text, type=kind)
