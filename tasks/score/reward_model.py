"""A reward model behind vLLM's pooling."""

from typing import Self

import msgspec

from tasks.errors import ScoreError
from tasks.score.config import RewardModelConfig, ScoreConfig
from tasks.score.endpoint import Endpoint
from tasks.score.function import digest_of
from tasks.score.scorer import Candidate, Reward


class _Pooled(msgspec.Struct):
    data: list[float | list[float]]


class _Answer(msgspec.Struct):
    data: list[_Pooled]


class RewardModel:
    """One output of the model for the whole conversation, which the server's chat template renders.

    Of a model that gives outputs by token, it is that of the last token. Its version is a digest of the
    model's name, the output and whether its activation is used.
    """

    name = "reward_model"

    def __init__(self, config: RewardModelConfig, endpoint: Endpoint) -> None:
        self._config, self._endpoint = config, endpoint
        self.version = digest_of([config.model, config.output, config.use_activation])

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """ConfigError when a setting of score.reward_model is missing or wrong."""
        settings = config.reward_model
        return cls(settings, Endpoint("score.reward_model", settings.url, settings))

    async def score(self, candidate: Candidate) -> Reward:
        request: dict[str, object] = {
            "messages": [dict(message) for message in candidate.messages],
            "add_generation_prompt": False,
            "use_activation": self._config.use_activation,
        }
        if self._config.model:
            request["model"] = self._config.model
        answer = await self._endpoint.ask("/pooling", request, _Answer)
        return Reward(self._output(answer))

    def _output(self, answer: _Answer) -> float:
        pooled = answer.data[0].data if answer.data else []
        by_token = [each for each in pooled if isinstance(each, list)]
        last = by_token[-1] if by_token else [each for each in pooled if not isinstance(each, list)]
        if self._config.output >= len(last):
            raise ScoreError(
                f"expected more than score.reward_model.output = {self._config.output} outputs from the reward model, "
                f"got {len(last)}"
            )
        return last[self._config.output]

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()
