"""How lanes of the flow belong together."""

import re
from typing import NamedTuple

from tasks.observe.ledger.timeline import FLOW


class Kin(NamedTuple):
    """Which lanes of the flow belong together: those of a group and of its trajectories, which are its parts."""

    family: str
    is_part: bool


def kin_of(process: str, lane: str) -> Kin:
    """Of a lane; those that are no group's, or another process's, have no family."""
    found = re.match(r"(?:evaluate\.|v)(\d+)|(\d+)", lane) if process == FLOW else None
    if found is None:
        return Kin("", is_part=process != FLOW)
    is_part = lane.startswith("v") or bool(re.match(r"\d+\.", lane))
    return Kin(found[0] if found[2] else f"v{found[1]}", is_part)
