"""The command `rollmill memory`: the memory that a trainer rank and a vLLM server of a preset need."""

import json
from collections.abc import Iterator
from dataclasses import fields

from rollmill.flows.config import RunConfig
from rollmill.flows.recipe import start_model_folder
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.engine.memory_plan import GIB, MemoryPlan, ModelSizes, plan_memory


def memory_lines(config: RunConfig) -> Iterator[str]:
    """Yield lines for the terminal: a trainer rank's memory by use, in GiB, and a server's weights and cache per token.

    Raises:
        ConfigError: there is no start model to read sizes from.
    """
    path = start_model_folder(config) / "config.json"
    if not path.is_file():
        raise ConfigError("model", config.model, f"{path} is missing; the model's sizes are read from it")
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
