"""The start model from the Hugging Face hub: downloaded once, to a folder below the working folder."""

from rollmill.flows.config import RunConfig
from rollmill.flows.recipe import is_hub_name, start_model_folder
from rollmill.tasks.errors import ConfigError

# Weights as safetensors, settings and tokenizer; neither code nor pickles.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")


def download_model(config: RunConfig) -> None:
    """Download the model that `model` names on the Hugging Face hub to `start_model_folder`, unless it is there.

    The library shows bars of its progress. An interrupted download is resumed by the next call. The folder appears when all files
    are there.

    Raises:
        ConfigError: the hub has no such model, cannot be reached, or there is no room.
    """
    folder = start_model_folder(config)
    if not is_hub_name(config.model) or (folder / "config.json").is_file():
        return
    # Imported only where a model is downloaded: it takes a third of a second.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    unfinished = folder.with_name(f".{folder.name}.partial")
    try:
        snapshot_download(config.model, local_dir=unfinished, allow_patterns=[*PATTERNS])
        # Another process may have finished the same download.
        if not folder.exists():
            unfinished.rename(folder)
    except (OSError, HTTPError, ValueError) as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        remedy = (
            f"there is no such folder, and it cannot be downloaded from the Hugging Face hub: {type(error).__name__}: "
            f"{first_line}; give a model folder, or copy one to {folder}"
        )
        raise ConfigError("model", config.model, remedy) from error
