"""What the commands `rescore`, `retrain` and `replay` do."""

import asyncio
import re
from collections.abc import Sequence

from flows.command import lead_to_prefect
from flows.config import RescoreConfig, overridden, parsed
from tasks.errors import ConfigError
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest


def rescore_config(
    folder: RunFolder,
    overrides: Sequence[str],
    scorer: str = "",
    steps: str = "",
    *,
    evaluations: bool = False,
) -> RescoreConfig:
    """Settings of rescoring: those of the run where it has them, and what was given.

    Args:
        folder: of the run.
        overrides: key=value.
        scorer: name or import path; empty: by the settings.
        steps: "A:B" for steps A to B - 1; either may be left out; empty: all.
        evaluations: score held-out trajectories too.

    Raises:
        ConfigError: a setting is wrong.
    """
    stored = read_manifest(folder).config
    values = {section: stored.get(section, {}) for section in ("score", "store", "observe")}
    if scorer:
        values["score"] = values["score"] | {"scorer": scorer, "sum": []}
    values |= _steps(steps) | ({"evaluations": True} if evaluations else {})
    return parsed(RescoreConfig, overridden(values, overrides))


def rescore_here(folder: RunFolder, config: RescoreConfig) -> None:
    """Run the flow rescore in this process.

    Raises:
        ConfigError: something is missing; nothing has been started.
    """
    from flows.unscored import check_rescoring, is_rescored

    check_rescoring(config)
    lead_to_prefect()
    from flows.ending import flow_command
    from flows.rescore import rescore

    with flow_command(lambda: is_rescored(folder, config), config.observe.exit_timeout_s):
        asyncio.run(rescore(folder.location, config))


def _steps(text: str) -> dict[str, int]:
    """Example: "2:5" gives first_step 2 and last_step 4."""
    if not text:
        return {}
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if not match or match[2] == "0":
        raise ConfigError("--steps", text, "write A:B for steps A to B - 1, such as 0:10, :10 or 30:")
    return {"first_step": int(match[1] or 0), "last_step": int(match[2]) - 1 if match[2] else -1}
