"""Where a start model lies: a function of its recipe."""

import hashlib
import json
from pathlib import Path

from flows.config import RunConfig

RECIPE_VERSION = 1
NOT_IN_THE_DIGEST = {"enabled", "root", "threads", "timeout_s"}


def start_model_folder(config: RunConfig) -> Path:
    """Where the start model lies, or will: `config.model`, or a folder named by recipe and seed."""
    if config.model:
        return Path(config.model)
    recipe = config.start_model.model_dump(exclude=NOT_IN_THE_DIGEST)
    recipe |= {"seed": config.seed, "environment": config.rollout.environment, "recipe": RECIPE_VERSION}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    return Path(config.start_model.root) / f"start-{digest[:16]}"
