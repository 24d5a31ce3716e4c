"""How many held-out trajectories an evaluation has, by the settings that a run stores."""

from collections.abc import Mapping
from typing import Any

from rollmill.tasks.store.run.immutable_settings import get_setting


def count_held_out(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of held-out trajectories of a version by environment, of stored settings; "" is a run's only environment.

    Of each prompt there are a greedy one and evaluate.samples sampled ones.

    Example: {"evaluate": {"n_prompts": 256, "samples": 4}} gives {"": 1280}.
    """
    n_prompts, samples = (
        _read(config, name, default) for name, default in (("n_prompts", 0), ("samples", 1))
    )
    entries = config.get("environments") or [{}]
    return {
        entry.get("name", ""): _read(entry, "n_prompts", n_prompts) * (1 + _read(entry, "samples", samples))
        for entry in entries
    }


def _read(settings: Mapping[str, Any], name: str, default: int) -> int:
    # The settings of a run of another version may be of another form.
    value = get_setting(settings, f"evaluate.{name}", default)
    return value if isinstance(value, int) else default
