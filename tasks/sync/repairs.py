"""What vLLM 0.32 leaves stale after a weight update on CPU, and what puts it right.

Both cases answer with HTTP 200 and wrong log-probabilities, off by whole nats.
"""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


def repack_heads(model: torch.nn.Module) -> None:
    """A tied head has no weight of its own to load, so it keeps its packed copy of the old embedding."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def repack_experts(model: torch.nn.Module) -> None:
    """Experts are packed when the kernel is built, which is at the first load only."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


CPU_REPAIRS: tuple[Callable[[torch.nn.Module], None], ...] = (repack_heads, repack_experts)


def needed_repairs() -> tuple[Callable[[torch.nn.Module], None], ...]:
    """What to run after each update on this machine: nothing unless it serves on CPU."""
    return CPU_REPAIRS if current_platform.is_cpu() else ()
