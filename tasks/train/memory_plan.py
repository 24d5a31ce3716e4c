"""What a trainer rank keeps in memory, computed from a model's sizes and the settings; no torch, no GPU.

Bytes a parameter: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 3.1. Activations: what autograd saves of a decoder layer of transformers 5 (Llama, Qwen2,
Qwen3), counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tasks.train.config import TrainConfig

GIB = 1 << 30
_MIB = 1 << 20
_SINGLE = 4
_MOMENTS = 2
_REDUCE_ELEMENTS = 500_000_000
"""DeepSpeed's default reduce_bucket_size: under ZeRO 1 and 2 gradients pass through a buffer of so many."""
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What models call the number of a layer's experts in their config.json."""
_LOGIT_COPIES = 3
"""Of a chunk of logits: itself, its log-softmax and the gradient, in single precision."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes that memory depends on.

    Attributes:
        hidden: width of the hidden states.
        layers: decoder layers.
        intermediate: width of a feed-forward layer; of one expert in a mixture.
        query: width of all query heads together.
        key: width of all key heads together; the values' too.
        vocabulary: tokens.
        is_tied: True when the head is the embedding.
        experts: of a layer; 0: no mixture.
        experts_a_token: of them.
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

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a model folder's config.json."""
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
        )

    @property
    def layer_linear(self) -> list[tuple[int, int, int]]:
        """(inputs, outputs, how many) of the linear layers of a decoder layer that adapters go to by default."""
        attention = [(self.hidden, self.query, 1), (self.hidden, self.key, 2), (self.query, self.hidden, 1)]
        forward = [(self.hidden, self.intermediate, 2), (self.intermediate, self.hidden, 1)]
        return attention + ([] if self.experts else forward)

    @property
    def parameters(self) -> int:
        """All of them, biases left out."""
        experts = self.experts * (3 * self.hidden * self.intermediate + self.hidden)
        linear = sum(inputs * outputs * n for inputs, outputs, n in self.layer_linear)
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return embeddings + self.layers * (linear + experts + 2 * self.hidden) + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of adapters on every linear layer but the head."""
        return self.layers * rank * sum((inputs + outputs) * n for inputs, outputs, n in self.layer_linear)

    def cache_bytes_a_token(self, item_bytes: int = 2) -> int:
        """What a server's KV cache holds of one token."""
        return 2 * self.layers * self.key * item_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one rank, at the moment when most is in use; what is offloaded is in `host` alone.

    Attributes:
        weights: as they are trained, those that adapters are added to included.
        gradients: until the update.
        optimizer: AdamW's moments, and the single-precision weights that ZeRO keeps beside them.
        activations: of one micro-batch, between forward and backward.
        logits: of one chunk of the head.
        reference: the frozen copy; none of the start model where adapters are trained on it.
        buffers: DeepSpeed's, for joining the ranks' gradients.
        host: in the machine's memory instead of the GPU's.
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
        """On the device."""
        return sum(float(getattr(self, each.name)) for each in fields(self) if each.name != "host")


def plan_memory(sizes: ModelSizes, config: TrainConfig) -> MemoryPlan:
    """What one of `config.ranks` ranks needs.

    A parameter of n trained ones is 4 bytes of weight, 4 of gradient and 8 of moments in single precision without
    ZeRO; in bfloat16 2 of weight, 4 of gradient, 4 of single-precision weight and 8 of moments. ZeRO 1 divides
    what the optimizer keeps by the ranks, ZeRO 2 the gradients too, ZeRO 3 the weights too. Frozen weights have
    neither gradient nor moments. Offloading takes gradients along with what the optimizer keeps.
    """
    item, stage = (
        _item_bytes(config),
        config.zero_stage if config.dtype == "float32" else max(1, config.zero_stage),
    )
    n = sizes.parameters
    adapters = sizes.adapter_parameters(config.lora.rank) if config.lora.rank else 0
    trained = adapters or n
    share = [1 if stage < least else config.ranks for least in (1, 2, 3)]
    weights = (n + adapters) * item / share[2]
    gradients = trained * _SINGLE / share[1]
    optimizer = trained * _SINGLE * (_MOMENTS + (stage > 0)) / share[0]
    bucket = float(min(trained, _REDUCE_ELEMENTS) * item if stage in (1, 2) else 0)
    is_offloaded, has_weights = config.offload != "none", config.offload != "optimizer_and_weights"
    has_copy = config.kl.reference == "frozen" and bool(config.kl.model or not adapters)
    host = (optimizer + gradients) * is_offloaded + weights * (not has_weights)
    return MemoryPlan(
        weights=weights * has_weights,
        gradients=gradients * (not is_offloaded),
        optimizer=optimizer * (not is_offloaded),
        activations=_activations(sizes, config),
        logits=float(
            _LOGIT_COPIES
            * min(config.head_chunk_mib * _MIB, config.micro_batch_tokens * sizes.vocabulary * _SINGLE)
        ),
        reference=n * item / share[2] * has_copy,
        buffers=bucket,
        host=host,
    )


def _activations(sizes: ModelSizes, config: TrainConfig) -> float:
    """Of a micro-batch of `micro_batch_tokens` tokens; with checkpoints a layer's input each, and one layer whole."""
    item = _item_bytes(config)
    layer = activation_items(sizes, config.dtype) * item * config.micro_batch_tokens
    if not config.gradient_checkpointing:
        return sizes.layers * layer
    return layer + sizes.layers * sizes.hidden * item * config.micro_batch_tokens


def activation_items(sizes: ModelSizes, dtype: str) -> int:
    """Elements that autograd saves of a token in one decoder layer.

    Of the feed-forward layer 4 of its width (gate, up, gate's activation, their product), for each expert that a token
    goes to; of the attention queries, keys, values and output; of the hidden states the inputs of norms and linear
    layers, norms being in single precision.
    """
    hidden = 6 if dtype == "float32" else 8
    per_expert = max(1, sizes.experts_a_token)
    routed = 2 * sizes.hidden * per_expert if sizes.experts else 0
    return (
        4 * sizes.intermediate * per_expert + routed + hidden * sizes.hidden + 2 * sizes.query + 2 * sizes.key
    )


def _item_bytes(config: TrainConfig) -> int:
    return 4 if config.dtype == "float32" else 2
