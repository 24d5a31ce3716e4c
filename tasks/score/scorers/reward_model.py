"""A reward model served by vLLM's pooling API."""

from typing import Self

import msgspec

from rollmill.tasks.errors import ScoreError
from rollmill.tasks.score.config import RewardModelConfig, ScoreConfig
from rollmill.tasks.score.score_function import settings_version
from rollmill.tasks.score.scorer import Candidate, Reward
from rollmill.tasks.score.scorers.model_endpoint import Endpoint

# The reward is the raw output: a sigmoid or softmax would squeeze the differences between good answers, which advantages need.
USE_ACTIVATION = False


class _PoolingOutput(msgspec.Struct):
    data: list[float | list[float]]


class _PoolingResponse(msgspec.Struct):
    data: list[_PoolingOutput]


class RewardModel:
    """Scorer whose reward is one output of a reward model for the whole conversation.

    The server renders the conversation with its chat template.

    If the model has an output for each token, the reward is that of the last token. The scorer's version is a digest of the
    model's name, the output's index and whether the activation is applied.
    """

    name = "reward_model"
    keeps_state = False

    def __init__(self, config: RewardModelConfig, endpoint: Endpoint) -> None:
        self._config, self._endpoint = config, endpoint
        self.version = settings_version([config.model, config.output, USE_ACTIVATION])

    @classmethod
    def from_config(cls, config: ScoreConfig) -> Self:
        """Create the scorer from settings; raises ConfigError if a setting of score.reward_model is missing or wrong."""
        settings = config.reward_model
        return cls(
            settings, Endpoint("score.reward_model", settings.url, settings.api_key_env, config.timeout_s)
        )

    async def score(self, candidate: Candidate) -> Reward:
        request: dict[str, object] = {
            "messages": [dict(message) for message in candidate.messages],
            # The conversation is over: no header of a next answer may follow.
            "add_generation_prompt": False,
            "use_activation": USE_ACTIVATION,
        }
        if self._config.model:
            request["model"] = self._config.model
        answer = await self._endpoint.ask("/pooling", request, _PoolingResponse)
        return Reward(self._output(answer))

    def _output(self, answer: _PoolingResponse) -> float:
        # A model with outputs for each token gives a list of lists; the last token has seen the whole conversation.
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
        """Close the HTTP connections to the server."""
        await self._endpoint.close()
