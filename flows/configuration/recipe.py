"""The folder of a run's start model, a function of its recipe or the place of a download, and the run's tokenizer."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.model_folders import MODELS, is_hub_name, model_folder
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.train.config import StartModelRecipe

RECIPE_VERSION = 3
# Weights as safetensors, settings and tokenizer; neither code nor pickles.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")


def start_model_recipe(config: RunConfig) -> StartModelRecipe:
    """Return the settings by which a run's start model is trained: `config.start_model` and constants."""
    return StartModelRecipe.model_validate(config.start_model.model_dump())


def start_model_folder(config: RunConfig) -> Path:
    """Return the start model's folder, existing or not.

    It is `config.model`, or below MODELS the name of a model on the Hugging Face hub, or a digest of recipe and seed.
    """
    if config.model:
        return model_folder(config.model)
    recipe = start_model_recipe(config).model_dump()
    recipe |= {"seed": config.seed, "environment": _named_environments(config), "recipe": RECIPE_VERSION}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    return MODELS / f"start-{digest[:16]}"


def _named_environments(config: RunConfig) -> str | dict[str, int]:
    """Return what of a run's environments the warm-up corpus depends on: the name of the only one, or all names with their weights."""
    if not config.environments:
        return _corpus(config.rollout)
    weights: Counter[str] = Counter()
    for entry, each in zip(config.environments, environment_configs(config).values(), strict=True):
        weights[_corpus(each.rollout)] += entry.weight
    return dict(sorted(weights.items()))


def _corpus(rollout: RolloutConfig) -> str:
    """Return the environment, with its arguments, whose warm-up corpus a start model learns: for an agent, that of its problems."""
    return str(rollout.agent.problems if rollout.environment.name == "agent" else rollout.environment)


def stored_model_folder(stored: Mapping[str, Any]) -> Path:
    """Return the start model's folder of a run with these stored settings; other settings of the run may be wrong today.

    Raises:
        ValueError: a setting that the folder depends on is missing or wrong.
    """
    # The model alone decides if it is given.
    names = ("model",) if stored.get("model") else ("start_model", "seed", "environments")
    values = {name: stored[name] for name in names if name in stored}
    if not stored.get("model"):
        values["rollout"] = {
            "environment": get_setting(stored, "rollout.environment", ""),
            "agent": get_setting(stored, "rollout.agent", {}),
        }
    return start_model_folder(RunConfig.model_validate(values))


def run_tokenizer(folder: RunFolder, model: str = "") -> ChatTokenizer:
    """Load the tokenizer of the model folder `model`, or by default of the run's start model, for the texts of stored tokens.

    Raises:
        ConfigError: there is no tokenizer; the remedy names --model.
    """
    place = Path(model) if model else None
    try:
        place = place or stored_model_folder(read_manifest(folder).config)
        return ChatTokenizer.load_texts(place)
    except ConfigError as error:
        raise ConfigError("--model", str(place), f"{error.remedy}; name the run's model folder") from error
    except ValueError as error:
        remedy = "its settings belong to another version of Rollmill, so its model is unknown; name the model folder"
        raise ConfigError("--model", folder.path("run.json"), remedy) from error


def download_model(field: str, model: str) -> None:
    """Download the model that a setting names on the Hugging Face hub to `model_folder`, unless it is there.

    The library shows bars of its progress. An interrupted download is resumed by the next call. The folder appears when all files
    are there.

    Args:
        field: the setting.
        model: its value; nothing is done for a folder.

    Raises:
        ConfigError: the hub has no such model, cannot be reached, or there is no room.
    """
    folder = model_folder(model)
    if not is_hub_name(model) or (folder / "config.json").is_file():
        return
    # Imported only where a model is downloaded: it takes a third of a second.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    unfinished = folder.with_name(f".{folder.name}.partial")
    try:
        snapshot_download(model, local_dir=unfinished, allow_patterns=[*PATTERNS])
        # Another process may have finished the same download.
        if not folder.exists():
            unfinished.rename(folder)
    except (OSError, HTTPError, ValueError) as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        remedy = (
            f"there is no such folder, and it cannot be downloaded from the Hugging Face hub: {type(error).__name__}: "
            f"{first_line}; give a model folder, or copy one to {folder}"
        )
        raise ConfigError(field, model, remedy) from error
