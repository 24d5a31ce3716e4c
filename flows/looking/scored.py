"""Which of a run's scores are meant, when none are named."""

from tasks.errors import ConfigError
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_scorers, stored_steps
from tasks.store.reader import read


def scorer_of(folder: RunFolder, asked: str = "") -> str | None:
    """NAME@VERSION of the scores that are asked for, by default those that the run trains on; None: no scores yet.

    Raises:
        ConfigError: the run has none by that name, or has several and does not say which are its own.
    """
    known = stored_scorers(folder)
    if asked:
        if asked not in known:
            raise ConfigError("--scorer", asked, f"the run has scores of {', '.join(known) or 'nobody yet'}")
        return asked
    if len(known) < 2:
        return known[0] if known else None
    own = _trained_on(folder) or _configured(folder)
    found = [key for key in known if own in (key, key.rpartition("@")[0])]
    if not found:
        raise ConfigError("--scorer", "", f"the run has scores of {', '.join(known)}; name one")
    return found[-1]


def _trained_on(folder: RunFolder) -> str:
    """The scorer of the newest batch that has rows; empty when none says."""
    for step in reversed(stored_steps(folder, "batches")):
        batch = read(folder, "batches", ["scorer"], step=step)
        if batch.num_rows:
            return str(batch["scorer"][0].as_py())
    return ""


def _configured(folder: RunFolder) -> str:
    """The name, without version, of the scorer in the run's settings."""
    name = read_manifest(folder).config.get("score", {}).get("scorer", "")
    return str(name).replace(":", ".")
