"""Settings of the sampler: what is asked of vLLM, and what is refused before anything starts."""

import re
from typing import Any

import numpy as np
import pytest

from rollmill.flows.configuration.settings import load
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.config import RolloutConfig, SamplingConfig
from rollmill.tasks.rollout.environment import Example
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from rollmill.tasks.serve.responses import Completion
from rollmill.tasks.serve.server_pool import ServerPool


def test_the_defaults_sample_from_the_trained_distribution_and_ask_vllm_for_nothing() -> None:
    assert SamplingConfig().parameters() == {}
    assert SamplingConfig().list_altered() == []


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": 20}, {"top_k": 20}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
        ({"structured_output": '{"regex": "[0-9]+"}'}, {"structured_outputs": {"regex": "[0-9]+"}}),
    ],
)
def test_what_changes_the_distribution_is_asked_for_and_named(
    settings: dict[str, Any], parameters: dict[str, Any]
) -> None:
    sampling = SamplingConfig(**settings)
    assert sampling.parameters() == parameters
    ((name, value),) = settings.items()
    assert sampling.list_altered() == [f"rollout.sampling.{name} = {value!r}"]


def test_a_stop_text_leaves_the_distribution_and_is_looked_for_in_special_tokens_too() -> None:
    sampling = SamplingConfig(stop=("</answer>", "\n\n"))
    assert sampling.list_altered() == []
    assert sampling.parameters() == {
        "stop": ["</answer>", "\n\n"],
        "detokenize": True,
        "skip_special_tokens": False,
    }


class Server:
    """A client that keeps what it was asked for."""

    url, max_failures_in_a_row = "http://a", 5

    async def generate(self, token_ids: np.ndarray, **sampling: object) -> Completion:
        self.asked = sampling
        return Completion(np.array([9, 1], np.int32), np.zeros(2, np.float32), "stop", ((0, "ab:1:4"),))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_every_request_has_them_greedy_ones_of_an_evaluation_too(temperature: float) -> None:
    pool, server = ServerPool(), Server()
    pool.admit(server)
    config = RolloutConfig(sampling=SamplingConfig(top_p=0.9, stop=("x",)))
    work = TrajectoryRequest("ab.7.0.0", 7, 0, 0, Example("0", {}), seed=3, temperature=temperature)
    await PoolSampler(pool, config, "ab", 60.0).sample(work, np.array([5, 6], np.int32), 1e9)
    assert server.asked["further"] == config.sampling.parameters()
    assert server.asked["temperature"] == temperature


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("{'json': {type: objekt}}", r"json is no JSON schema: 'objekt' is not valid .*\(at \$\.type\)"),
        ('{"json": "{"}', "json cannot be read"),
        ('{"choice": []}', "choice is empty or of another type"),
        ('{"choice": [1]}', "choice is not a list of texts"),
        ('{"grammar": " "}', "grammar is empty"),
        ('{"regex": 1}', "regex is empty or of another type"),
        ('{"regex": "a", "choice": ["b"]}', "give a JSON object with one of json, regex, choice, grammar"),
        ("[1", "the value is not YAML|give a JSON object"),
        ("no", "Input should be a valid string|give a JSON object"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused_by_name(form: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load("quickstart", (f"rollout.sampling.structured_output={form}",))
    assert re.match(r"rollout\.sampling\.structured_output = |--set = ", str(raised.value))


def test_a_schema_of_an_earlier_draft_is_taken_as_its_draft_defines_it() -> None:
    schema = '{"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}'
    given = SamplingConfig(structured_output=f'{{"json": {schema}}}')
    assert list(given.parameters()) == ["structured_outputs"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.sampling.top_p=0", r"rollout\.sampling\.top_p = 0: Input should be greater than 0"),
        ("rollout.sampling.stop=['']", r"rollout\.sampling\.stop\.0 = '': .*at least 1 character"),
        ("rollout.top_p=0.9", r"rollout\.top_p = 0\.9: .*did you mean rollout\.sampling\.top_p\?"),
    ],
)
def test_a_wrong_value_or_name_is_refused_with_the_remedy(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("quickstart", (setting,))
