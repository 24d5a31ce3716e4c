"""What a trainer rank keeps in memory, computed from a model's sizes and the settings; no torch, no GPU.

`python -m rollmill.tasks.train.engine.memory_plan` prints the plan for models from 0.5 to 70 billion parameters.

Bytes a parameter: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 3.1. Activations: what autograd saves of a decoder layer of transformers 5 (Llama, Qwen2,
Qwen3), counted.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from rollmill.tasks.train.config import LoraConfig, TrainConfig

GIB = 1 << 30
# Largest size of the logits in memory; more trained tokens pass the head in chunks. A GPU is busy with one of this size, and
# smaller ones save little next to a micro-batch's activations.
HEAD_CHUNK_BYTES = 512 << 20
_SINGLE = 4
_MOMENTS = 2
REDUCE_ELEMENTS = 500_000_000
"""Largest reduce_bucket_size: under ZeRO 1 and 2 gradients pass through a buffer of so many."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What models call the number of a layer's experts in their config.json."""
_GEMMA = ("gemma2", "gemma3_text")
"""Model types with two more norms in a layer, which compute their whole output in single precision."""
_HEAD_NORMS = ("gemma3_text", "qwen3", "qwen3_moe")
"""Model types that normalize the queries and keys of each head."""
_LOGIT_COPIES = 3
"""Of a chunk of logits: itself, its log-softmax and the gradient, in single precision."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a language model from which its memory is computed.

    Attributes:
        hidden: width of the hidden states.
        layers: decoder layers.
        intermediate: width of a feed-forward layer; in a mixture of experts that of one expert.
        query: width of all query heads together.
        key: width of all key heads together, and of all value heads together.
        vocabulary: number of tokens.
        is_tied: True when the output head shares the embedding's weight.
        experts: number of experts of a layer; 0 without a mixture of experts.
        experts_a_token: number of experts that a token goes to.
        has_head_norms: True when queries and keys are normalized.
        is_gemma: True for the norms of Gemma: four in a layer, where others have two.
    """

    hidden: int
    layers: int
    intermediate: int
    query: int
    key: int
    vocabulary: int
    is_tied: bool
    experts: int = 0
    experts_a_token: int = 0
    has_head_norms: bool = False
    is_gemma: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read the sizes from a model folder's config.json."""
        config = {**config, **config.get("text_config", {})}
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        experts = next((config[name] for name in NUMBERS_OF_EXPERTS if config.get(name)), 0)
        return cls(
            hidden=hidden,
            layers=config["num_hidden_layers"],
            intermediate=(experts and config.get("moe_intermediate_size")) or config["intermediate_size"],
            query=heads * width,
            key=(config.get("num_key_value_heads") or heads) * width,
            vocabulary=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings")),
            experts=experts,
            experts_a_token=config.get("num_experts_per_tok", 0) if experts else 0,
            has_head_norms=config.get("model_type") in _HEAD_NORMS,
            is_gemma=config.get("model_type") in _GEMMA,
        )

    @property
    def layer_linear(self) -> list[tuple[int, int, int]]:
        """(inputs, outputs, count) of each kind of linear layer in a decoder layer, without experts and routers."""
        attention = [(self.hidden, self.query, 1), (self.hidden, self.key, 2), (self.query, self.hidden, 1)]
        forward = [(self.hidden, self.intermediate, 2), (self.intermediate, self.hidden, 1)]
        return attention + ([] if self.experts else forward)

    @property
    def parameters(self) -> int:
        """Number of parameters, without biases."""
        experts = self.experts * (3 * self.hidden * self.intermediate + self.hidden)
        linear = sum(inputs * outputs * n for inputs, outputs, n in self.layer_linear)
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return embeddings + self.layers * (linear + experts + 2 * self.hidden) + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of rank `rank` on linear layers but experts, routers and the head."""
        return self.layers * rank * sum((inputs + outputs) * n for inputs, outputs, n in self.layer_linear)

    def cache_bytes_a_token(self, item_bytes: int = 2) -> int:
        """Return the bytes that one token takes in a server's KV cache, at `item_bytes` bytes per number."""
        return 2 * self.layers * self.key * item_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Peak memory of one rank, in bytes; what is offloaded counts in `host` alone.

    Attributes:
        weights: in the type that the model computes with, frozen weights below adapters included.
        gradients: accumulated until the update; under ZeRO 1 DeepSpeed also keeps those of a micro-batch in bfloat16.
        optimizer: AdamW's moments, and the single-precision weights that ZeRO keeps as well.
        activations: of one micro-batch, between forward and backward.
        logits: of one chunk of tokens at the output head.
        reference: frozen copy of the reference model; 0 where that is the start model below the adapters.
        buffers: DeepSpeed's buffers for reducing gradients.
        host: offloaded to the machine's memory.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    reference: float
    buffers: float
    host: float

    @property
    def total(self) -> float:
        """Bytes on the device: the sum of all uses but `host`. Loading the model takes less."""
        return sum(float(getattr(self, each.name)) for each in fields(self) if each.name != "host")


def plan_memory(sizes: ModelSizes, config: TrainConfig) -> MemoryPlan:
    """Compute the peak memory of one of the `config.ranks` ranks that train a model.

    A trained parameter takes 4 bytes of weight, 4 of gradient and 8 of moments in single precision without
    ZeRO; in bfloat16 2 of weight, 4 of gradient, 4 of single-precision weight and 8 of moments, and under ZeRO 1 without offloading 2 more of
    gradient, and another 2 to send it to other ranks. ZeRO 1 divides
    what the optimizer keeps by the number of ranks, ZeRO 2 the gradients too, ZeRO 3 the weights too. Frozen weights have
    neither gradient nor moments. Offloading takes gradients along with what the optimizer keeps.
    """
    item = _item_bytes(config)
    stage = config.zero_stage
    n = sizes.parameters
    adapters = sizes.adapter_parameters(config.lora.rank) if config.lora.rank else 0
    trained = adapters or n
    share = [1 if stage < least else config.ranks for least in (1, 2, 3)]
    weights = (n + adapters) * item / share[2]
    # What DeepSpeed calls BF16_Optimizer keeps gradients in both formats, and sends all at once.
    has_both = stage == 1 and config.dtype == "bfloat16" and config.offload == "none"
    gradients = trained * (_SINGLE / share[1] + item * has_both)
    optimizer = trained * _SINGLE * (_MOMENTS + (stage > 0)) / share[0]
    bucket = float(
        min(trained, REDUCE_ELEMENTS) * (_SINGLE if stage == 1 else item) if stage in (1, 2) else 0
    )
    buffers = float(trained * item * (config.ranks > 1)) if has_both else bucket
    is_offloaded, has_weights = config.offload != "none", config.offload != "optimizer_and_weights"
    has_copy = config.kl.reference == "frozen" and bool(config.kl.model or not adapters)
    host = (optimizer + gradients) * is_offloaded + weights * (not has_weights)
    return MemoryPlan(
        weights=weights * has_weights,
        gradients=gradients * (not is_offloaded),
        optimizer=optimizer * (not is_offloaded),
        activations=_activations(sizes, config),
        logits=float(
            _LOGIT_COPIES * min(HEAD_CHUNK_BYTES, config.micro_batch_tokens * sizes.vocabulary * _SINGLE)
        ),
        reference=n * item / share[2] * has_copy,
        buffers=buffers,
        host=host,
    )


def _activations(sizes: ModelSizes, config: TrainConfig) -> float:
    """Compute the bytes of a micro-batch's activations, in all layers or, with gradient checkpointing, in one.

    Gradient checkpointing also keeps the input of every layer.
    """
    item = _item_bytes(config)
    layer = activation_items(sizes, config.dtype) * item * config.micro_batch_tokens
    if not config.gradient_checkpointing:
        return sizes.layers * layer
    return layer + sizes.layers * sizes.hidden * item * config.micro_batch_tokens


def activation_items(sizes: ModelSizes, dtype: str) -> int:
    """Elements that autograd saves for a token in one decoder layer.

    Of the feed-forward layer 4 times its width (gate, up, gate's activation, their product), for each expert that a token
    goes to; of the attention queries, keys, values, and the output in the kernel's order and in the sequence's; of the hidden
    states the inputs of two linear layers and what the norms keep: their input and their output before the weight, of which in
    bfloat16 the input, and Gemma's output too, is in single precision.
    """
    norm = 2 if dtype == "float32" else 4 if sizes.is_gemma else 3
    hidden = 2 + (4 if sizes.is_gemma else 2) * norm
    per_expert = max(1, sizes.experts_a_token)
    routed = 2 * sizes.hidden * per_expert if sizes.experts else 0
    heads = norm * (sizes.query + sizes.key) * sizes.has_head_norms
    return (
        4 * sizes.intermediate * per_expert
        + routed
        + hidden * sizes.hidden
        + 3 * sizes.query
        + 2 * sizes.key
        + heads
    )


def _item_bytes(config: TrainConfig) -> int:
    return 4 if config.dtype == "float32" else 2


MODELS = {
    "Qwen2.5-0.5B": ModelSizes(896, 24, 4864, 896, 128, 151_936, is_tied=True),
    "Qwen2.5-1.5B": ModelSizes(1536, 28, 8960, 1536, 256, 151_936, is_tied=True),
    "Qwen2.5-3B": ModelSizes(2048, 36, 11_008, 2048, 256, 151_936, is_tied=True),
    "Qwen2.5-7B": ModelSizes(3584, 28, 18_944, 3584, 512, 152_064, is_tied=False),
    "Qwen2.5-14B": ModelSizes(5120, 48, 13_824, 5120, 1024, 152_064, is_tied=False),
    "Qwen3-30B-A3B": ModelSizes(
        2048, 48, 768, 4096, 512, 151_936, is_tied=False, experts=128, experts_a_token=8, has_head_norms=True
    ),
    "Qwen2.5-32B": ModelSizes(5120, 64, 27_648, 5120, 1024, 152_064, is_tied=False),
    "Llama-3.1-70B": ModelSizes(8192, 80, 28_672, 8192, 1024, 128_256, is_tied=False),
}
_BF16 = TrainConfig(dtype="bfloat16", gradient_checkpointing=True, micro_batch_tokens=4096)
_LORA = LoraConfig(rank=16)
SETUPS = {
    "float32, 1 rank": TrainConfig(dtype="float32", gradient_checkpointing=False, micro_batch_tokens=4096),
    "1 rank": _BF16,
    "1 rank, offload optimizer": _BF16.model_copy(update={"offload": "optimizer", "zero_stage": 2}),
    "8 ranks, ZeRO 2": _BF16.model_copy(update={"ranks": 8, "zero_stage": 2}),
    "8 ranks, ZeRO 3": _BF16.model_copy(update={"ranks": 8, "zero_stage": 3}),
    "64 ranks, ZeRO 3": _BF16.model_copy(update={"ranks": 64, "zero_stage": 3}),
    "1 rank, LoRA": _BF16.model_copy(update={"lora": _LORA}),
    "8 ranks, LoRA, ZeRO 3": _BF16.model_copy(update={"lora": _LORA, "ranks": 8, "zero_stage": 3}),
}


def memory_table() -> Iterator[str]:
    """Return lines of a Markdown table: GiB of one rank's device, by model and setup."""
    yield f"| model | parameters | {' | '.join(SETUPS)} |"
    yield f"|---|---:|{'---:|' * len(SETUPS)}"
    for name, sizes in MODELS.items():
        cells = [f"{plan_memory(sizes, config).total / GIB:.1f}" for config in SETUPS.values()]
        yield f"| {name} | {sizes.parameters / 1e9:.2f} G | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(memory_table()) + "\n")
