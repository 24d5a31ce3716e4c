"""Whether a run fits in the memory of its GPUs, before anything starts; and if not, which settings would make it fit."""

import importlib.metadata
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import VISIBLE, GpuAssignment, GpuState
from rollmill.tasks.train.engine.memory_plan import GIB, ModelSizes, plan_memory

# CUDA 13, for which torch 2.13 is built, needs this major version of NVIDIA's driver.
LEAST_DRIVER = 580
# CUDA context, kernels and NCCL of a trainer rank; judged, not measured.
CONTEXT_BYTES = 1 * GIB
# Who needs memory, in texts.
RANK, VLLM = "a trainer rank", "vLLM"
# Below this share of a GPU vLLM has hardly a cache.
LEAST_SHARE = 0.15


def check_gpus(config: RunConfig, assigned: GpuAssignment, gpus: Sequence[GpuState]) -> None:
    """Refuse a run that its GPUs cannot carry: too old a driver, a torch without CUDA, or too little memory.

    Args:
        config: all settings.
        assigned: GPUs of the launched processes.
        gpus: those of this machine; empty if none is known.

    Raises:
        ConfigError: names the setting, the figures, and settings that would fit.
    """
    if not gpus or not (assigned.trainer or any(assigned.servers)):
        return
    check_driver(gpus[0].driver)
    if assigned.trainer:
        check_torch()
    sizes = read_sizes(config)
    if sizes is None:
        return
    for gpu in gpus:
        if text := find_excess(config, sizes, assigned, gpu):
            on_both = any(_uses(each, gpu) for each in assigned.servers) and _uses(assigned.trainer, gpu)
            field = "serve.gpu_memory_utilization" if on_both else "GPU memory"
            value = config.serve.gpu_memory_utilization if on_both else gpu.name
            raise ConfigError(field, value, text)


def check_driver(version: str) -> None:
    """Refuse an NVIDIA driver that is too old for torch's CUDA; ConfigError gives the remedy."""
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < LEAST_DRIVER:
        remedy = f"CUDA 13 needs version {LEAST_DRIVER} or newer: update it, or hide the GPUs with {VISIBLE}= to compute on the CPU"
        raise ConfigError("NVIDIA driver", version, remedy)


def check_torch() -> None:
    """Refuse the CPU build of torch, for a machine with a GPU; ConfigError gives the remedy."""
    version = importlib.metadata.version("torch")
    if version.endswith("+cpu"):
        remedy = f"this is the CPU build, and there is a GPU: `make clean setup` installs the CUDA build; {VISIBLE}= hides the GPUs"
        raise ConfigError("torch", version, remedy)


def read_sizes(config: RunConfig) -> ModelSizes | None:
    """Read the sizes of a run's start model; None if it is made here, or has another form than Llama's."""
    path = start_model_folder(config) / "config.json"
    if config.start_model.steps or not path.is_file():
        return None
    try:
        return ModelSizes.of(json.loads(path.read_text()))
    except KeyError:
        return None


def find_excess(config: RunConfig, sizes: ModelSizes, assigned: GpuAssignment, gpu: GpuState) -> str:
    """Return why a GPU's memory does not suffice, with figures and a remedy; empty if it does.

    Example: "GPU 0 (H100) has 79.6 GiB free; a trainer rank needs 73.5 and vLLM 31.8: it fits with
    train.gradient_checkpointing=true (32.2 and 31.8)".
    """
    free = gpu.total_bytes - gpu.used_bytes
    needs = plan_needs(config, sizes, assigned, gpu)
    if sum(needs.values()) <= free:
        return ""
    used = f" of {gpu.total_bytes / GIB:.1f}" if gpu.used_bytes > GIB else ""
    has = f"GPU {gpu.number} ({gpu.name}) has {free / GIB:.1f}{used} GiB free; {_describe(needs)}"
    changed: dict[str, Any] = {}

    def plan_changed() -> Mapping[str, float]:
        return plan_needs(_change(config, changed), sizes, assigned, gpu)

    for name, value in _list_changes(config, plan_changed, free / gpu.total_bytes):
        changed[name] = value
        after = plan_changed()
        if sum(after.values()) <= free:
            settings = " and ".join(f"{each}={_format(changed[each])}" for each in changed)
            return f"{has}: it fits with {settings} (then {_describe(after)})"
    return f"{has}: no setting alone makes it fit; train adapters (train.lora.rank=16), on more GPUs, or a smaller model"


def plan_needs(
    config: RunConfig, sizes: ModelSizes, assigned: GpuAssignment, gpu: GpuState
) -> Mapping[str, float]:
    """Compute the bytes of a GPU that its processes need, by RANK and VLLM."""
    needs: dict[str, float] = {}
    if _uses(assigned.trainer, gpu):
        plan = plan_memory(sizes, config.train)
        needs[RANK] = plan.total + CONTEXT_BYTES
    if any(_uses(each, gpu) for each in assigned.servers):
        needs[VLLM] = config.serve.gpu_memory_utilization * gpu.total_bytes
        if config.serve.sleep and RANK in needs:
            # Awake, a server takes again what the trainer needs only to train; asleep, it has its context left.
            needs[VLLM] = max(needs[VLLM] - plan.activations - plan.logits, CONTEXT_BYTES)
    return needs


def _uses(visible: str, gpu: GpuState) -> bool:
    return any(each == gpu.number or gpu.uuid.startswith(each) for each in visible.split(",") if each)


def _format(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _describe(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{who} needs {n_bytes / GIB:.1f}" for who, n_bytes in needs.items())


def _list_changes(
    config: RunConfig, plan: Callable[[], Mapping[str, float]], free: float
) -> Iterator[tuple[str, object]]:
    """Yield settings that save memory and their values, the cheapest first; each is tried with those before.

    Args:
        config: all settings.
        plan: computes the needs with the changes so far.
        free: share of the GPU's memory that other processes leave.
    """
    train, trains = config.train, RANK in plan()
    if trains:
        if not train.gradient_checkpointing:
            yield "train.gradient_checkpointing", True
        for divisor in (2, 4):
            # Shorter than a row, a micro-batch would be refused.
            if train.micro_batch_tokens // divisor >= config.serve.max_model_len:
                yield "train.micro_batch_tokens", train.micro_batch_tokens // divisor
    if (vllm := plan().get(VLLM, 0.0)) and not config.serve.sleep:
        total = vllm / config.serve.gpu_memory_utilization
        # Rounded down to hundredths.
        share = math.floor(100 * (free - plan().get(RANK, 0.0) / total)) / 100
        if LEAST_SHARE <= share < config.serve.gpu_memory_utilization:
            yield "serve.gpu_memory_utilization", share
    if trains and train.offload == "none":
        if train.zero_stage == 0:
            yield "train.zero_stage", 1
        yield "train.offload", "optimizer"


def _change(config: RunConfig, changed: Mapping[str, Any]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {"train": {}, "serve": {}}
    for name, value in changed.items():
        section, _, field = name.partition(".")
        sections[section][field] = value
    updated = {name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    return config.model_copy(update=updated)
