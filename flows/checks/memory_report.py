"""The command `rollmill memory`: the memory that a trainer rank and a vLLM server of a preset need."""

import json
from collections.abc import Iterator
from dataclasses import fields

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.checks.gpu_memory import find_excess
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.recipe import start_model_folder
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import GpuState, read_gpus
from rollmill.tasks.serve.vllm_launch import gpus_per_server
from rollmill.tasks.train.engine.memory_plan import GIB, MemoryPlan, ModelSizes, plan_memory

# An H100 of "80 GB" has 79.6 GiB.
GIB_PER_GB = 0.995


def memory_lines(config: RunConfig, gpu_gb: float = 0.0) -> Iterator[str]:
    """Yield lines for the terminal: a trainer rank's memory by use, in GiB, and a server's weights and cache per token.

    The last line says whether both fit in GPUs of `gpu_gb` GB, or if that is 0, in those of this machine; and if not, what to change.

    Raises:
        ConfigError: there is no start model to read sizes from, or its config.json is not that of a decoder like Llama.
    """
    path = start_model_folder(config) / "config.json"
    if not path.is_file():
        remedy = (
            "give a model's folder"
            if config.model
            else "a run with these settings makes it; start one, or give model=FOLDER"
        )
        raise ConfigError(
            "model", config.model, f"{path} is missing, from which the model's sizes are read; {remedy}"
        )
    try:
        sizes = ModelSizes.of(json.loads(path.read_text()))
    except KeyError as error:
        remedy = f"its config.json has no {error}: only decoders with the settings of Llama are supported"
        raise ConfigError("model", config.model, remedy) from error
    plan = plan_memory(sizes, config.train)
    train = config.train
    yield f"{sizes.parameters / 1e9:.3f} G parameters; one of {train.ranks} trainer ranks, in GiB:"
    for each in fields(MemoryPlan):
        if each.name != "host":
            yield f"  {each.name:<12}{getattr(plan, each.name) / GIB:10.3f}"
    yield f"  {'total':<12}{plan.total / GIB:10.3f}"
    if plan.host:
        yield f"  {plan.host / GIB:.3f} more in the machine's memory (train.offload = {train.offload})"
    item = 4 if config.serve.dtype == "float32" else 2
    yield f"A server: {sizes.parameters * item / GIB:.3f} GiB of weights, {sizes.cache_bytes_a_token(item)} bytes of KV cache a token"
    gpus = imagine_gpus(config, gpu_gb) if gpu_gb else read_gpus()
    if not gpus:
        yield "No GPU here: --gpu 80 compares with GPUs of 80 GB"
        return
    names = tuple(each.number for each in gpus)
    assigned = assign_run_gpus(config, samples=True, trains=True, visible=names)
    excesses = (find_excess(config, sizes, assigned, gpu) for gpu in gpus)
    yield next(
        filter(None, excesses),
        "It fits: GPUs " + ",".join(names) + f" of {gpus[0].total_bytes / GIB:.1f} GiB",
    )


def imagine_gpus(config: RunConfig, gpu_gb: float) -> tuple[GpuState, ...]:
    """Return as many idle GPUs of `gpu_gb` GB, as vendors count (80 GB: 79.6 GiB), as a run's launched processes need."""
    train, serve = config.train, config.serve
    counts = [0 if train.url else train.ranks, 0 if serve.urls else serve.servers * gpus_per_server(serve)]
    n_gpus = max(counts) if serve.share_gpus else sum(counts)
    size = int(gpu_gb * GIB_PER_GB * GIB)
    return tuple(
        GpuState(str(number), f"GPU-{number}", f"{gpu_gb:g} GB", size, 0, "") for number in range(n_gpus)
    )
