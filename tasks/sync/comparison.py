"""Whether two models of vLLM's are the same, module by module: their bytes, and what kernels have packed."""

from typing import Any

import torch
from torch import nn

from tasks.sync.link import as_bytes

_ROWS = 4


def differing_bytes(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Names of the live model's modules with a parameter or buffer of their own that the other has otherwise."""
    return tuple(name for name, one, two in _pairs(live, other) if not _same_bytes(one, two))


def differing_kernels(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Names of the live model's modules whose kernel computes otherwise than the other's.

    On CPU a linear layer's weights are packed where nobody can read them, so both compute the same random rows. Such a
    kernel serves one thread at a time: the live model must not compute anything meanwhile.
    """
    return tuple(name for name, one, two in _pairs(live, other) if not _compute_alike(one, two))


def _pairs(live: nn.Module, other: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    others = dict(other.named_modules(remove_duplicate=False))
    return [(name, module, others[name]) for name, module in live.named_modules()]


def _same_bytes(one: nn.Module, two: nn.Module) -> bool:
    tensors = [
        {name: each for name, each in (module._parameters | module._buffers).items() if each is not None}
        for module in (one, two)
    ]
    return tensors[0].keys() == tensors[1].keys() and all(
        each.shape == tensors[1][name].shape
        and torch.equal(as_bytes(each.contiguous()), as_bytes(tensors[1][name].contiguous()))
        for name, each in tensors[0].items()
    )


def _compute_alike(one: Any, two: Any) -> bool:
    kernels = getattr(one, "cpu_linear", None), getattr(two, "cpu_linear", None)
    if kernels[0] is None or kernels[1] is None:
        return kernels[0] is kernels[1]
    weights = one.weight, two.weight
    width = getattr(one, "input_size_per_partition", weights[0].shape[-1])
    rows = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weights[0].dtype)
    return torch.equal(kernels[0](rows, weights[0], None), kernels[1](rows, weights[1], None))
