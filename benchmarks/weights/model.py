"""Names and shapes of Qwen2.5-0.5B: 290 tensors, 0.99 GB in bf16."""

from collections.abc import Iterator
from math import prod

import torch

from rollmill.tasks.sync.transfer_plan import TensorCut, TensorPlan, lay_out_tensors

HIDDEN, MIDDLE, KEYS, VOCABULARY, LAYERS = 896, 4864, 128, 151_936, 24
ITEM_BYTES = 2


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor, in the order of the model."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, out in (("q_proj", HIDDEN), ("k_proj", KEYS), ("v_proj", KEYS)):
            yield f"{at}.self_attn.{name}.weight", (out, HIDDEN)
            yield f"{at}.self_attn.{name}.bias", (out,)
        yield f"{at}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{at}.mlp.gate_proj.weight", (MIDDLE, HIDDEN)
        yield f"{at}.mlp.up_proj.weight", (MIDDLE, HIDDEN)
        yield f"{at}.mlp.down_proj.weight", (HIDDEN, MIDDLE)
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def tensors() -> tuple[TensorPlan, ...]:
    """The stream of all of them."""
    return lay_out_tensors((name, shape, "bfloat16") for name, shape in shapes())


def shard(shape: tuple[int, ...], rank: int, n_ranks: int) -> range:
    """Flat numbers of a tensor that a ZeRO-3 rank has: a part of ceil(numbers / ranks), the last ones less.

    Example: of 5 numbers the second of 2 ranks has the last 2.
    """
    size = prod(shape)
    each = -(-size // n_ranks)
    return range(min(rank * each, size), min((rank + 1) * each, size))


def shard_cuts(plan: tuple[TensorPlan, ...], n_ranks: int) -> tuple[TensorCut, ...]:
    """How ZeRO-3 ranks divide each tensor."""
    return tuple(TensorCut(0, len(shard(each.shape, 0, n_ranks)) * ITEM_BYTES) for each in plan)


def weights(rank: int, n_ranks: int) -> list[torch.Tensor]:
    """Flat bf16 numbers of each tensor, or this rank's shard of it."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randint(
            -(2**15), 2**15, (len(shard(shape, rank, n_ranks)),), dtype=torch.int16, generator=generator
        ).view(torch.bfloat16)
        for _, shape in shapes()
    ]
