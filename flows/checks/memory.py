"""What a preset's trainer and servers need of memory, as a table in the terminal."""

import json
from collections.abc import Iterator
from dataclasses import fields

from flows.config import RunConfig
from flows.recipe import start_model_folder
from tasks.errors import ConfigError
from tasks.train.memory_plan import GIB, MemoryPlan, ModelSizes, plan_memory


def memory_lines(config: RunConfig) -> Iterator[str]:
    """One line for each part of a trainer rank's memory, in GiB, and what a server needs for weights and a token.

    Raises:
        ConfigError: there is no start model to read sizes from.
    """
    path = start_model_folder(config) / "config.json"
    if not path.is_file():
        raise ConfigError("model", config.model, f"there is no {path} to read the model's sizes from")
    try:
        sizes = ModelSizes.of(json.loads(path.read_text()))
    except KeyError as error:
        remedy = f"its config.json has no {error}: the plan is of decoders with the sizes that Llama has"
        raise ConfigError("model", config.model, remedy) from error
    plan = plan_memory(sizes, config.train)
    train = config.train
    yield f"{sizes.parameters / 1e9:.3f} G parameters; one of {train.ranks} trainer ranks, in GiB:"
    for each in fields(MemoryPlan):
        if each.name != "host":
            yield f"  {each.name:<12}{getattr(plan, each.name) / GIB:10.3f}"
    yield f"  {'together':<12}{plan.total / GIB:10.3f}"
    if plan.host:
        yield f"  {plan.host / GIB:.3f} besides in the machine's memory (train.offload = {train.offload})"
    item = 4 if config.serve.dtype == "float32" else 2
    yield f"A server: {sizes.parameters * item / GIB:.3f} GiB of weights, {sizes.cache_bytes_a_token(item)} bytes of KV cache a token"
