"""Differences between a model in float32 and the same weights served with a planted fault in bfloat16, against the limits of the start."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from rollmill.tasks.sync.weight_parity import START_LIMITS, LogprobDifferences, find_excess

AT_START = replace(START_LIMITS, high=math.inf)
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    # Weights as large as those of a trained model: with the usual 0.02 all tokens are almost equally likely.
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def trained() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE)).eval()


def score(model: Gemma2ForCausalLM, dtype: torch.dtype) -> list[list[float]]:
    token_ids = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logprobs = model.to(dtype)(token_ids).logits.float().log_softmax(-1)
    return logprobs[:, :-1].gather(-1, token_ids[:, 1:, None])[..., 0].tolist()


def with_settings(model: Gemma2ForCausalLM, **settings: Any) -> Gemma2ForCausalLM:
    """The same weights in a model with other settings."""
    other = Gemma2ForCausalLM(Gemma2Config(**SHAPE | settings)).eval()
    other.load_state_dict(model.state_dict())
    return other


def quantize(model: Gemma2ForCausalLM) -> Gemma2ForCausalLM:
    """The model with matrices of 15 values, -7 to 7 times a scale."""
    other = deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            if each.ndim > 1:
                scale = each.abs().max() / 7
                each.copy_((each / scale).round() * scale)
    return other


@pytest.mark.parametrize(
    ("plant", "is_refused"),
    [
        (deepcopy, False),
        (
            lambda model: with_settings(model, rope_parameters={"rope_type": "default", "rope_theta": 3.0}),
            True,
        ),
        (
            lambda model: with_settings(model, final_logit_softcapping=None, attn_logit_softcapping=None),
            True,
        ),
        (quantize, True),
    ],
    ids=["no fault", "rope", "no soft cap", "four bits"],
)
def test_planted_faults_exceed_the_limits_of_the_start_and_bfloat16_does_not(
    trained: Gemma2ForCausalLM,
    plant: Callable[[Gemma2ForCausalLM], Gemma2ForCausalLM],
    is_refused: bool,
) -> None:
    expected = score(deepcopy(trained), torch.float32)
    found = [torch.tensor(each).numpy() for each in score(plant(trained), torch.bfloat16)]
    assert bool(find_excess(LogprobDifferences.measure(expected, found), AT_START)) is is_refused
