"""A second copy of the model that a vLLM worker serves: loaded while the first computes, then switched with it.

Both are built by vLLM from the same configuration. What computes is found in two places: below the root module, which
is vLLM's for good and keeps its identity, and by layer name in the configuration's forward context. A switch exchanges
the contents of both, and hands the caches of keys and values over. So nothing is copied, no module has contents that
were not loaded into it, and the weights that kernels have packed, which nobody can read or copy, come along.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tasks.errors import SyncError

Repair = Callable[[torch.nn.Module], None]
Weights = Iterable[tuple[str, torch.Tensor]]


def load_again(
    model: torch.nn.Module, config: VllmConfig, weights: Weights, repairs: Iterable[Repair]
) -> None:
    """Load a checkpoint's tensors into a model that has been loaded before, in the layouts that its kernels want.

    When it fails the model is open, and cannot be used any more.
    """
    initialize_layerwise_reload(model)
    model.load_weights(weights)  # type: ignore[operator]  # of vLLM's models, not of every module
    finalize_layerwise_reload(model, config.model_config)
    for repair in repairs:
        repair(model)


class SecondCopy:
    """A model beside the one that serves. Built in the thread that computes: building changes settings of the process.

    Args:
        live: the model that serves.
        config: its configuration.
        device: where it is.

    Raises:
        SyncError: this model cannot have a second copy, or there is not the memory for one.
    """

    def __init__(self, live: torch.nn.Module, config: VllmConfig, device: torch.device) -> None:
        _check_kind(config)
        _check_memory(live, device)
        self._live, self._config, self._device = live, config, device
        self._own = copy.copy(config)
        self._own.compilation_config = copy.copy(config.compilation_config)
        self._own.compilation_config.static_forward_context = {}
        self._own.compilation_config.static_all_moe_layers = []
        with set_default_torch_dtype(config.model_config.dtype), device:
            self.model = initialize_model(self._own).eval()
        _separate(self.model, live)
        self._is_loaded = False

    def load(self, weights: Weights, repairs: Iterable[Repair]) -> None:
        """Load a checkpoint's tensors; may run in a thread while the live model computes.

        When it fails the copy cannot be used any more.
        """
        with set_current_vllm_config(self._own), torch.no_grad():
            if self._is_loaded:
                load_again(self.model, self._own, weights, repairs)
                return
            self.model.load_weights(weights)
            process_weights_after_loading(self.model, self._own.model_config, self._device)
            self._is_loaded = True

    def switch(self) -> None:
        """Exchange it with the live model, between two steps of that."""
        live = self._config.compilation_config.static_forward_context
        own = self._own.compilation_config.static_forward_context
        for name, layer in own.items():
            if isinstance(layer, Attention):
                _attach(layer, live[name])
        self._live.__dict__, self.model.__dict__ = self.model.__dict__, self._live.__dict__
        before = dict(live)
        live.update(own)
        own.update(before)


def _separate(model: torch.nn.Module, live: torch.nn.Module) -> None:
    """Give a model modules of its own where vLLM gave it the live model's, as it does with rotary embeddings."""
    shared = set(live.modules())
    own: dict[torch.nn.Module, torch.nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in shared:
                if child not in own:
                    own[child] = copy.deepcopy(child)
                    record_metadata_for_reloading(own[child])
                parent._modules[name] = own[child]


def _attach(layer: Attention, live: Attention) -> None:
    """What vLLM has attached to a layer since it was built: its cache, and what backends note there."""
    added = {name: value for name, value in live.__dict__.items() if name not in layer.__dict__}
    layer.__dict__.update(added, kv_cache=live.kv_cache)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, without what kernels have packed besides."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def _check_kind(config: VllmConfig) -> None:
    others = {
        type(layer).__name__
        for layer in config.compilation_config.static_forward_context.values()
        if hasattr(layer, "kv_cache") and not isinstance(layer, Attention)
    }
    found = [
        *(sorted(others)),
        *(["LoRA"] if config.lora_config else []),
        *(["speculative decoding"] if config.speculative_config else []),
    ]
    if found:
        raise SyncError(
            f"no second copy of a model with {', '.join(found)}: set sync.mode=keep for this server"
        )


def _check_memory(live: torch.nn.Module, device: torch.device) -> None:
    """What kernels pack may be as much again as the parameters."""
    needed = 2 * model_bytes(live)
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
    else:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) << 10
    if needed > left:
        raise SyncError(
            f"a second copy of the model needs up to {needed >> 20} MiB, {left >> 20} are left: "
            "set sync.mode=keep, or give this server less memory for its caches"
        )
