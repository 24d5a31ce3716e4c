"""Every use of vLLM's private API: weight transfer, repairs, a second model, packed kernels, and generations as arrays.

`PRIVATE_NAMES` is the register. Where a name is missing, the feature that needs it says so with a remedy, or vLLM's own
way is taken (`Feature`). A test looks for all of them in the installed vLLM.
"""

import copy
import inspect
import multiprocessing
import os
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from rollmill.tasks.errors import SyncError

SEEN_IN = "0.32.0"
"""The version of vLLM in which all of these names were seen."""

Repair = Callable[[nn.Module], None]
Weights = Iterable[tuple[str, torch.Tensor]]


class Feature(Enum):
    """A feature of the plugin that needs private names of vLLM; its value describes what happens without them."""

    RELOAD = "a server cannot take new weights; install vLLM 0.32"
    CPU_REPAIRS = "log-probabilities of a server on CPU would be wrong after an update; install vLLM 0.32"
    SECOND_COPY = "set sync.mode=keep, and sync.verify_every=0"
    KERNELS = "packed kernels cannot be compared; set sync.verify_every=0"
    FORK = "a server on CPU imports everything twice as it starts"
    ARRAYS = "generations are sent as JSON, which costs the server and the flow CPU time"


@dataclass(frozen=True, slots=True)
class VllmName:
    """A private name of vLLM.

    Attributes:
        feature: the feature that needs the name.
        module: import path.
        name: attribute of the module, or CLASS.ATTRIBUTE in it.
        source: text in the module's source, for an attribute that vLLM sets on instances only; empty for a name that can be imported.
    """

    feature: Feature
    module: str
    name: str
    source: str = ""

    def find(self) -> Any:
        """Return the object that has this name in the installed vLLM; None if it is an attribute of instances.

        Raises:
            SyncError: the installed vLLM lacks the name; says what follows or what to do.
        """
        try:
            found: Any = import_module(self.module)
            if self.source:
                if self.source not in inspect.getsource(found):
                    raise AttributeError(self.source)
                return None
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise SyncError(
                f"vLLM {import_module('vllm').__version__} has no {self.module}.{self.name}, which {SEEN_IN} has: "
                f"{self.feature.value}"
            ) from error
        return found


_LOADER = "vllm.model_executor.model_loader"
_SERVING = "vllm.entrypoints.scale_out.token_in_token_out"
_SERVE = "vllm.entrypoints.serve"
_TRANSFER = "vllm.distributed.weight_transfer"
REGISTER_ENGINE = VllmName(
    Feature.RELOAD, f"{_TRANSFER}.factory", "WeightTransferEngineFactory.register_engine"
)
TRANSFER_ENGINE = VllmName(Feature.RELOAD, f"{_TRANSFER}.base", "WeightTransferEngine")
INIT_INFO = VllmName(Feature.RELOAD, f"{_TRANSFER}.base", "WeightTransferInitInfo")
UPDATE_INFO = VllmName(Feature.RELOAD, f"{_TRANSFER}.base", "WeightTransferUpdateInfo")
INIT_REQUEST = VllmName(Feature.RELOAD, f"{_TRANSFER}.base", "WeightTransferInitRequest")
UPDATE_REQUEST = VllmName(Feature.RELOAD, f"{_TRANSFER}.base", "WeightTransferUpdateRequest")
PLATFORM = VllmName(Feature.RELOAD, "vllm.platforms", "current_platform")
NOT_COMPILED = VllmName(Feature.RELOAD, "vllm.config", "CompilationMode.NONE")
INITIALIZE_RELOAD = VllmName(Feature.RELOAD, f"{_LOADER}.reload", "initialize_layerwise_reload")
FINALIZE_RELOAD = VllmName(Feature.RELOAD, f"{_LOADER}.reload", "finalize_layerwise_reload")
# vLLM's worker on CPU replaces torch.set_num_threads by a function that does nothing.
SET_THREADS = VllmName(Feature.RELOAD, "torch._C", "set_num_threads")
HEAD = VllmName(Feature.CPU_REPAIRS, "vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead")
MOE_KERNEL = VllmName(
    Feature.CPU_REPAIRS,
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base",
    "FusedMoEMethodBase.moe_kernel",
    source="self.moe_kernel",
)
REPACK_EXPERTS = VllmName(
    Feature.CPU_REPAIRS,
    "vllm.model_executor.layers.fused_moe.modular_kernel",
    "FusedMoEExperts.process_weights_after_loading",
)
BUILD_MODEL = VllmName(Feature.SECOND_COPY, f"{_LOADER}.utils", "initialize_model")
PROCESS_WEIGHTS = VllmName(Feature.SECOND_COPY, f"{_LOADER}.utils", "process_weights_after_loading")
RECORD_METADATA = VllmName(Feature.SECOND_COPY, f"{_LOADER}.reload", "record_metadata_for_reloading")
DEFAULT_DTYPE = VllmName(Feature.SECOND_COPY, "vllm.utils.torch_utils", "set_default_torch_dtype")
ATTENTION = VllmName(Feature.SECOND_COPY, "vllm.model_executor.layers.attention", "Attention")
SET_CONFIG = VllmName(Feature.SECOND_COPY, "vllm.config", "set_current_vllm_config")
LAYERS_BY_NAME = VllmName(
    Feature.SECOND_COPY,
    "vllm.config.compilation",
    "CompilationConfig.static_forward_context",
    source="static_forward_context: dict[str, Any]",
)
MOE_LAYERS = VllmName(
    Feature.SECOND_COPY,
    "vllm.config.compilation",
    "CompilationConfig.static_all_moe_layers",
    source="static_all_moe_layers: list[str]",
)
CPU_LINEAR = VllmName(
    Feature.KERNELS, "vllm.model_executor.layers.utils", "layer.cpu_linear", source="layer.cpu_linear = "
)
SERVING_TOKENS = VllmName(Feature.ARRAYS, f"{_SERVING}.serving", "ServingTokens.serve_tokens_full_generator")
RAISE_IF_ERROR = VllmName(Feature.ARRAYS, f"{_SERVING}.serving", "ServingTokens._raise_if_error")
FIND_HANDLER = VllmName(Feature.ARRAYS, f"{_SERVING}.api_router", "generate_tokens")
GENERATE_ROUTE = VllmName(Feature.ARRAYS, f"{_SERVING}.api_router", "generate")
GENERATE_REQUEST = VllmName(Feature.ARRAYS, f"{_SERVING}.protocol", "GenerateRequest")
ERROR_RESPONSE = VllmName(Feature.ARRAYS, f"{_SERVE}.engine.protocol", "ErrorResponse")
COUNT_LOAD = VllmName(Feature.ARRAYS, f"{_SERVE}.utils.api_utils", "load_aware_call")
CHECK_JSON = VllmName(Feature.ARRAYS, f"{_SERVE}.utils.api_utils", "validate_json_request")
CANCEL = VllmName(Feature.ARRAYS, f"{_SERVE}.utils.api_utils", "with_cancellation")
ENGINE_CONTEXT = VllmName(Feature.FORK, "vllm.v1.engine.utils", "get_mp_context")
PRIVATE_NAMES = tuple(each for each in list(globals().values()) if isinstance(each, VllmName))


def require(feature: Feature) -> None:
    """Check that the installed vLLM has every name that a feature needs; SyncError names the first that is missing."""
    for each in PRIVATE_NAMES:
        if each.feature is feature:
            each.find()


# The start of a server


def fork_engine() -> None:
    """Have a server on CPU fork its engine's process, as one on GPUs does, instead of importing everything again.

    vLLM 0.32 always spawns it on CPU, for the sake of OpenMP's threads, which a forked process does not have. With
    one thread there are none; with more, or without the private name, vLLM's own way is taken.
    """
    if not PLATFORM.find().is_cpu() or os.environ.get("OMP_NUM_THREADS") != "1":
        return
    with suppress(SyncError):
        ENGINE_CONTEXT.find()
        module = import_module(ENGINE_CONTEXT.module)
        setattr(module, ENGINE_CONTEXT.name, partial(multiprocessing.get_context, "fork"))


# Reloading, and what it leaves stale


def reload_weights(model: nn.Module, model_config: Any, weights: Weights, repairs: Iterable[Repair]) -> None:
    """Load a checkpoint's tensors into a model again, in the layouts that its kernels use.

    If it fails, the model can no longer be used.

    Args:
        model: vLLM's, which was loaded before.
        model_config: vLLM's `ModelConfig`.
        weights: (name, tensor) of the checkpoint.
        repairs: from `choose_repairs`.
    """
    INITIALIZE_RELOAD.find()(model)
    model.load_weights(weights)  # type: ignore[operator]  # of vLLM's models, not of every module
    FINALIZE_RELOAD.find()(model, model_config)
    for repair in repairs:
        repair(model)


def repack_heads(model: nn.Module) -> None:
    """Repack a model's output head for its kernel, from the weights that it has now."""
    # A head that is tied to the embedding has no weight to load, so vLLM 0.32 keeps the packed copy of the old embedding,
    # and the server answers with log-probabilities that are off by whole nats.
    head = HEAD.find()
    for layer in model.modules():
        if isinstance(layer, head):
            layer.quant_method.process_weights_after_loading(layer)


def repack_experts(model: nn.Module) -> None:
    """Repack the experts of a mixture-of-experts model for their kernels, from the weights that they have now."""
    # vLLM 0.32 packs experts at the first load only. Stale ones change log-probabilities as a stale head does.
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


CPU_REPAIRS: tuple[Repair, ...] = (repack_heads, repack_experts)


def choose_repairs(device: str) -> tuple[Repair, ...]:
    """Choose the functions that repair a model after each update on a type of device: none unless it is "cpu".

    Raises:
        SyncError: the installed vLLM lacks a private name that they need.
    """
    if device != "cpu":
        return ()
    require(Feature.CPU_REPAIRS)
    return CPU_REPAIRS


# A second model


def copy_config(config: Any) -> Any:
    """Copy a `VllmConfig` for a second model, with separate maps of layers, which are empty."""
    # vLLM refuses a layer whose name is already in the map of the live model.
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    return own


def build_model(config: Any, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a model from a `VllmConfig`, as vLLM does, without loading weights."""
    with DEFAULT_DTYPE.find()(dtype), device:
        model: nn.Module = BUILD_MODEL.find()(config).eval()
    return model


def load_first(model: nn.Module, model_config: Any, weights: Weights, device: torch.device) -> None:
    """Load a checkpoint's tensors into a new model, and process them for its kernels."""
    model.load_weights(weights)  # type: ignore[operator]  # of vLLM's models, not of every module
    PROCESS_WEIGHTS.find()(model, model_config, device)


def separate_modules(model: nn.Module, live: nn.Module) -> None:
    """Replace the modules that a model shares with the live one by copies."""
    # vLLM caches rotary embeddings for the whole process: loading the one model would change the other.
    shared = set(live.modules())
    own: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in shared:
            if module not in own:
                own[module] = copy.deepcopy(module)
                RECORD_METADATA.find()(own[module])
            model.set_submodule(name, own[module])


def exchange_models(live: nn.Module, other: nn.Module, config: Any, other_config: Any) -> None:
    """Exchange the contents of two models in place; the live one keeps its caches of keys and values."""
    layers = config.compilation_config.static_forward_context
    other_layers = other_config.compilation_config.static_forward_context
    attention = ATTENTION.find()
    for name, layer in other_layers.items():
        if isinstance(layer, attention):
            # Backends attach caches and notes to a layer after it was built.
            added = {key: each for key, each in layers[name].__dict__.items() if key not in layer.__dict__}
            layer.__dict__.update(added, kv_cache=layers[name].kv_cache)
    # vLLM keeps the root module and the map of layers for good, so both stay and what is in them is exchanged.
    live.__dict__, other.__dict__ = other.__dict__, live.__dict__
    before = dict(layers)
    layers.update(other_layers)
    other_layers.update(before)


def find_other_caches(config: Any) -> list[str]:
    """List the class names of layers with a cache that is not attention's, sorted; a second copy does not support them."""
    attention = ATTENTION.find()
    return sorted(
        {
            type(layer).__name__
            for layer in config.compilation_config.static_forward_context.values()
            if hasattr(layer, "kv_cache") and not isinstance(layer, attention)
        }
    )


def find_packed_kernel(layer: Any) -> tuple[Callable[..., torch.Tensor] | None, torch.Tensor | None, int]:
    """Return vLLM's function(rows, weight, bias) that computes a linear layer on CPU, the layer's weight, and its input width.

    Return (None, None, 0) for a layer to which vLLM attached no such function. The weight may be empty: the function can hold
    a packed copy instead.
    """
    kernel = getattr(layer, "cpu_linear", None)
    if kernel is None:
        return None, None, 0
    width = getattr(layer, "input_size", layer.weight.shape[-1])
    return kernel, layer.weight, getattr(layer, "input_size_per_partition", width)


# Generations as arrays


def encode_responses(handler: Any, encode: Callable[[Any], bytes]) -> Any:
    """Wrap vLLM's handler of generations: its response becomes `encode(output)` of a finished `CompletionOutput`."""
    return _encoding_class(type(handler), encode)(handler)  # type: ignore[arg-type]  # classes are hashable


@cache
def _encoding_class(kind: Hashable, encode: Callable[[Any], bytes]) -> Any:
    class EncodingHandler(kind):  # type: ignore[misc,valid-type]  # vLLM has no types
        def __init__(self, handler: Any) -> None:
            # The same state, not a copy: vLLM counts requests in it.
            self.__dict__ = handler.__dict__

        async def serve_tokens_full_generator(
            self, request: Any, result_generator: AsyncGenerator[Any, None], request_id: str, *_: Any
        ) -> bytes:
            final = None
            async for result in result_generator:
                final = result
            assert final is not None
            (output,) = final.outputs
            self._raise_if_error(output.finish_reason, request_id)
            return encode(output)

    return EncodingHandler


# Threads


def limit_threads() -> None:
    """Let the current thread compute on any core, but on one at a time."""
    # vLLM's worker on CPU pins itself to cores, which its threads inherit.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    SET_THREADS.find()(1)
