"""Where models are: a folder, or a name on the Hugging Face hub, whose model is downloaded to a folder below the working folder."""

import re
from pathlib import Path

MODELS = Path("models")
"""Folder, below the working folder, of downloaded models, and of start models, each under a digest of recipe and seed."""
# "." and ".." begin no name.
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def is_hub_name(model: str) -> bool:
    """Return True if `model` is no folder here but has the form of a name on the Hugging Face hub, ORGANIZATION/NAME."""
    # A path below the folder of models is meant as a folder, also when it is missing.
    is_path = Path(model).exists() or Path(model).parts[:1] == MODELS.parts
    return not is_path and _HUB_NAME.fullmatch(model) is not None


def model_folder(model: str) -> Path:
    """Return the folder, existing or not, of a model that a setting gives by its folder or by its name on the hub."""
    return MODELS / model if is_hub_name(model) else Path(model)
