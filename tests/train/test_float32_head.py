"""Logits of a bfloat16 model in single precision."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel, Qwen2Config

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.memory_plan import HEAD_CHUNK_BYTES
from rollmill.tasks.train.engine.policy_model import PolicyModel, compute_float32_logits
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.samples import Samples

VOCABULARY, CAP = 512, 2.0
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    # Logits of some size, whose rounding to bfloat16 shows.
    "initializer_range": 0.5,
}
CONFIGS = {
    "untied": Qwen2Config(**SIZES),
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "soft cap": Gemma2Config(**SIZES, final_logit_softcapping=CAP),
}
CPU = torch.device("cpu")


def create_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), dtype=torch.bfloat16).eval()


def compute(
    model: PreTrainedModel, tokens: torch.Tensor, head_dtype: str, chunk_bytes: int = HEAD_CHUNK_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T - 1] log-probabilities of all tokens but the first, and the gradient of a weighted sum of them, as one vector."""
    config = TrainConfig(layout="padded", dtype="bfloat16")
    samples = Samples.from_tokens([tokens.numpy()], [torch.arange(len(tokens)).numpy() > 0])
    batch = Packer(config, "padded", CPU).micro_batch(samples, [0], [""])
    policy = PolicyModel(model, is_partitioned=False, head_dtype=head_dtype, chunk_bytes=chunk_bytes)
    logprobs, _ = policy.values(model, batch, entropy_gradient=False)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    gradient = torch.cat([each.grad.float().flatten() for each in model.parameters()])
    return logprobs.detach(), gradient


def compute_naively(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[T - 1] log-probabilities of the head's product in single precision."""
    hidden = model.get_decoder()(tokens.unsqueeze(0)).last_hidden_state[0, :-1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().t()
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits.log_softmax(1).gather(1, tokens[1:, None]).squeeze(1).detach()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("chunk_bytes", [HEAD_CHUNK_BYTES, 4 * VOCABULARY * 16])
def test_float32_logits_are_not_rounded_to_bfloat16(kind: str, chunk_bytes: int) -> None:
    tokens = torch.arange(60) * 7 % VOCABULARY
    exact, gradient = compute(create_model(kind), tokens, "float32", chunk_bytes)
    rounded, rounded_gradient = compute(create_model(kind), tokens, "model")

    expected = compute_naively(create_model(kind), tokens)
    assert (exact - expected).abs().max() < 1e-5
    assert (rounded - expected).abs().max() > 1e-3
    # The gradient is rounded as it is without: both differ by rounding alone.
    assert (gradient - rounded_gradient).norm() < 0.03 * rounded_gradient.norm()


def test_a_bias_is_added_in_float32() -> None:
    model = create_model("untied")
    head = torch.nn.Linear(SIZES["hidden_size"], VOCABULARY, bias=True, dtype=torch.bfloat16)
    model.set_output_embeddings(head)
    compute_float32_logits(model)
    hidden = torch.randn(3, SIZES["hidden_size"], dtype=torch.bfloat16)
    expected = hidden.float() @ head.weight.float().t() + head.bias.float()
    assert torch.allclose(model.get_output_embeddings()(hidden), expected, atol=1e-6)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))

    model = create_model("untied")
    model.set_output_embeddings(Scaled())
    with pytest.raises(
        ConfigError,
        match=r"head of Qwen2ForCausalLM is no linear layer: set it to model",
    ):
        compute_float32_logits(model)
