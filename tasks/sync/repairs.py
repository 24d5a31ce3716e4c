"""What vLLM 0.32 leaves stale after a weight update on CPU, and what puts it right.

Both cases answer with HTTP 200 and wrong log-probabilities, off by whole nats.
"""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


def repair_after_update(model: torch.nn.Module) -> None:
    """Repack what kernels on CPU read in place of the weights; nothing happens on other devices."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        _repack_head(layer)
        _repack_experts(layer)


def _repack_head(layer: torch.nn.Module) -> None:
    """A tied head has no weight of its own to load, so it keeps its packed copy of the old embedding."""
    if isinstance(layer, ParallelLMHead):
        layer.quant_method.process_weights_after_loading(layer)


def _repack_experts(layer: torch.nn.Module) -> None:
    """Experts are packed when the kernel is built, which is at the first load only."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    if kernel is not None:
        kernel.fused_experts.process_weights_after_loading(layer)
