"""What a run's settings, as run.json has them, make of its rows."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.errors import ManifestError
from tasks.store.layout import MANIFEST, RunFolder
from tasks.store.manifest import Manifest


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RolloutSettings(_Section):
    """Trajectories of a group, and steps that a trained row may lie behind."""

    group_size: int = 1
    max_staleness: int = 0


class ScoreSettings(_Section):
    """True: a group that lacks a trajectory may have no scores."""

    needs_whole_group: bool = False


class StoreSettings(_Section):
    """Steps whose routed experts are kept."""

    keep_routing_steps: int = 0


class EvaluateSettings(_Section):
    """Whether, after how many steps each, and on how many problems a version is evaluated; 0: never, on none."""

    enabled: bool = True
    every: int = 0
    n_prompts: int = 0


class RunSettings(_Section):
    """The settings that say what must be stored; those that a run lacks have the values by which nothing must.

    Attributes:
        steps: of the whole run; None when it does not say.
    """

    steps: int | None = None
    rollout: RolloutSettings = RolloutSettings()
    score: ScoreSettings = ScoreSettings()
    store: StoreSettings = StoreSettings()
    evaluate: EvaluateSettings = EvaluateSettings()


def settings_by_run(folder: RunFolder, manifest: Manifest) -> dict[str, RunSettings]:
    """Read the settings of a run and of those that it was forked from, by their ids; unknown ones are as the run's.

    Raises:
        ManifestError: one of them is not what it can be; names it.
    """
    places = {
        origin.run: (f"origins.{number}.config", origin.config)
        for number, origin in enumerate(manifest.origins)
        if origin.config
    }
    read = {run: _parsed(folder, *each) for run, each in places.items()}
    own = _parsed(folder, "config", manifest.config)
    return {origin.run: own for origin in manifest.origins} | read | {manifest.run: own}


def _parsed(folder: RunFolder, where: str, config: Mapping[str, Any]) -> RunSettings:
    try:
        return RunSettings.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join([where, *(str(part) for part in first["loc"])])
        raise ManifestError(f"{folder.path(MANIFEST)} is damaged: {place}: {first['msg']}") from error
