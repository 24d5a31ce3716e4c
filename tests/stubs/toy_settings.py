"""Settings of runs of seconds on a CPU, for tests and benchmarks: a tiny model, short sequences, a large learning rate."""

import copy
from collections.abc import Mapping
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import validate

TOY: Mapping[str, Any] = {
    "start_model": {"steps": 900},
    "rollout": {"environment": "addition", "max_completion_tokens": 24},
    "score": {"scorer": "addition"},
    "train": {"dtype": "float32", "lr": 1e-3, "micro_batch_tokens": 4096, "gradient_checkpointing": False},
    "serve": {"dtype": "float32", "max_model_len": 256},
}


def toy_values(values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The toy settings with these on top, section by section; with a model no start model is made."""
    merged = _merge(copy.deepcopy(dict(TOY)), values or {})
    if merged.get("model"):
        merged["start_model"]["steps"] = 0
    return merged


def validate_toy(values: Mapping[str, Any] | None = None) -> RunConfig:
    """The toy settings with these on top, checked as those of a run are."""
    return validate(toy_values(values))


def toy_config(values: Mapping[str, Any] | None = None) -> RunConfig:
    """The toy settings with these on top, validated; settings that contradict each other are not refused."""
    return RunConfig.model_validate(toy_values(values))


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    for name, other in others.items():
        mine = values.get(name)
        values[name] = _merge(mine, other) if isinstance(mine, dict) and isinstance(other, Mapping) else other
    return values
