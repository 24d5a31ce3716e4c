"""What must hold of an evaluation by the flow evaluate, before anything is started."""

from tasks.errors import ConfigError
from tasks.store.layout import RunFolder
from tasks.store.resume import complete_checkpoints


def chosen_version(folder: RunFolder, wanted: int) -> int:
    """The version that `evaluate.version` means; 0 where nothing is trained yet.

    Raises:
        ConfigError: it has no checkpoint; names those that have one.
    """
    stored = sorted({0, *complete_checkpoints(folder)})
    if wanted < 0:
        return stored[-1]
    if wanted not in stored:
        there_are = ", ".join(map(str, stored[1:])) or "no version"
        remedy = f"{folder.location} has checkpoints of {there_are}; give one of them, 0 for the start model, or -1 for the last"
        raise ConfigError("evaluate.version", wanted, remedy)
    return wanted
