"""A second copy of a vLLM worker's model, and the comparison of two models."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.base_weights import free_host_bytes
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.vllm_plugin.private_vllm import (
    SET_CONFIG,
    Feature,
    Repair,
    Weights,
    build_model,
    copy_config,
    exchange_models,
    find_other_caches,
    find_packed_kernel,
    load_first,
    reload_weights,
    require,
    separate_modules,
)

_ROWS = 4


class SecondCopy:
    """A second copy of a worker's model, into which weights are loaded while the live model serves.

    Build it in the thread that computes: this changes process settings.

    Args:
        live: the model that serves.
        config: vLLM's `VllmConfig` of the live model.
        device: device of both models.

    Attributes:
        model: the second model.

    Raises:
        SyncError: this model cannot have a second copy, or there is not the memory for one.
    """

    def __init__(self, live: nn.Module, config: Any, device: torch.device) -> None:
        require(Feature.SECOND_COPY)
        _check_kind(config)
        _check_memory(live, device)
        self._live, self._config, self._device = live, config, device
        self._own = copy_config(config)
        self.model = build_model(self._own, config.model_config.dtype, device)
        separate_modules(self.model, live)
        self._is_loaded = False

    def load(self, weights: Weights, repairs: Iterable[Repair]) -> None:
        """Load a checkpoint's tensors; may run in a thread while the live model computes.

        If it fails, the copy can no longer be used.
        """
        with SET_CONFIG.find()(self._own), torch.no_grad():
            if self._is_loaded:
                reload_weights(self.model, self._own.model_config, weights, repairs)
            else:
                load_first(self.model, self._own.model_config, weights, self._device)
                self._is_loaded = True

    def switch(self) -> None:
        """Exchange the second model with the live one; call it between two steps of the live one."""
        exchange_models(self._live, self.model, self._config, self._own)


def _check_kind(config: Any) -> None:
    found = [
        *find_other_caches(config),
        *(["LoRA"] if config.lora_config else []),
        *(["speculative decoding"] if config.speculative_config else []),
    ]
    if found:
        raise SyncError(
            f"no second copy of a model with {', '.join(found)}: set sync.mode=keep for this server"
        )


def _check_memory(live: nn.Module, device: torch.device) -> None:
    tensors = [*live.parameters(), *live.buffers()]
    # Tied weights share memory and count once. Kernels may pack as much again as the parameters.
    needed = 2 * sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
    else:
        left = free_host_bytes()
    if needed > left:
        raise SyncError(
            f"a second copy of the model needs up to {needed >> 20} MiB, {left >> 20} are left: "
            "set sync.mode=keep, or give this server less memory for its caches"
        )


def find_differing_bytes(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Return the names of the live model's modules of which a parameter or buffer differs from the other model's."""
    return tuple(name for name, one, two in _pair_modules(live, other) if not _have_same_bytes(one, two))


def find_differing_kernels(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Return the names of the live model's modules whose packed kernel computes other results than the other model's.

    The live model must not compute meanwhile: a kernel serves one thread at a time.

    Raises:
        SyncError: the installed vLLM gives no access to its kernels.
    """
    if next(live.parameters()).device.type == "cpu":
        require(Feature.KERNELS)
    return tuple(name for name, one, two in _pair_modules(live, other) if not _compute_alike(one, two))


def _pair_modules(live: nn.Module, other: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    others = dict(other.named_modules(remove_duplicate=False))
    return [(name, module, others[name]) for name, module in live.named_modules()]


def _have_same_bytes(one: nn.Module, two: nn.Module) -> bool:
    tensors = [
        dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for module in (one, two)
    ]
    return tensors[0].keys() == tensors[1].keys() and all(
        each.shape == tensors[1][name].shape
        and torch.equal(as_bytes(each.contiguous()), as_bytes(tensors[1][name].contiguous()))
        for name, each in tensors[0].items()
    )


def _compute_alike(one: Any, two: Any) -> bool:
    # On CPU a linear layer's packed weights cannot be read, so both kernels compute the same random rows.
    (kernel, weight, width), (other_kernel, other_weight, _) = (
        find_packed_kernel(one),
        find_packed_kernel(two),
    )
    if kernel is None or other_kernel is None or weight is None:
        return kernel is other_kernel
    rows = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return torch.equal(kernel(rows, weight, None), other_kernel(rows, other_weight, None))
