"""An LLM that judges one trajectory by itself."""

from pathlib import Path
from typing import Protocol, Self, TypeVar

import jinja2
import msgspec
from jinja2.sandbox import SandboxedEnvironment

from tasks.errors import ConfigError, JudgeUnparsableError
from tasks.score.chat import JudgeModel
from tasks.score.config import JudgeConfig, ScoreConfig
from tasks.score.function import digest_of
from tasks.score.scorer import Candidate, Reward

Answer = TypeVar("Answer")


class Model(Protocol):
    """Answers prompts in JSON; JudgeModel does."""

    async def ask(self, prompt: str, kind: type[Answer]) -> Answer:
        """See JudgeModel."""

    async def close(self) -> None:
        """Close what it holds open."""


class Judgement(msgspec.Struct):
    """What `judge` answers; other fields may stand beside."""

    score: float


class Judge:
    """The score that the LLM gives the trajectory, as it was asked to by a template of the settings.

    Its version is a digest of model, prompt, temperature and range, so that scores of different judges never mix.
    """

    name = "judge"

    def __init__(self, config: JudgeConfig, model: Model) -> None:
        self._config, self._model = config, model
        text = prompt_of(config)
        self._prompt = template_of(text)
        self.version = digest_of([config.model, text, config.temperature, config.score_min, config.score_max])

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """ConfigError when a setting of score.judge is missing or wrong."""
        lowest, highest = config.judge.score_min, config.judge.score_max
        if lowest >= highest:
            remedy = f"give a number above score.judge.score_min = {lowest:g}"
            raise ConfigError("score.judge.score_max", highest, remedy)
        return cls(config.judge, JudgeModel.from_config(config.judge))

    async def score(self, candidate: Candidate) -> Reward:
        prompt = self._prompt.render(
            messages=candidate.messages,
            answer=candidate.answer,
            example=candidate.example,
            outcome=candidate.outcome,
            env=candidate.env,
        )
        score = (await self._model.ask(prompt, Judgement)).score
        lowest, highest = self._config.score_min, self._config.score_max
        if not lowest <= score <= highest:
            raise JudgeUnparsableError(f"expected a score from {lowest:g} to {highest:g}, got {score:g}")
        return Reward(score)

    async def close(self) -> None:
        """Close the connections."""
        await self._model.close()


def prompt_of(config: JudgeConfig) -> str:
    """The prompt of the settings, or of the file that they name; ConfigError when it cannot be read."""
    if not config.prompt_file:
        return config.prompt
    try:
        return Path(config.prompt_file).read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "score.judge.prompt_file", config.prompt_file, f"cannot be read: {error}"
        ) from error


def template_of(text: str) -> jinja2.Template:
    """The template; ConfigError when it is none. A name that it does not have is an error when it is rendered."""
    environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        remedy = f"not a Jinja template: line {error.lineno}: {error.message}"
        raise ConfigError("score.judge.prompt", text, remedy) from error
