"""How lanes of the flow belong together, and for what."""

import re
from typing import NamedTuple

from tasks.observe.ledger.timeline import FLOW, IDLE

COLLECTING, EVALUATION = "collecting", "evaluation"
"""What lanes of the flow are for: a step's groups and their trajectories, and an evaluation's."""
LANES = {COLLECTING: r"\d|collect\.", EVALUATION: r"v\d|evaluate\."}
"""How such lanes begin."""
STRAGGLERS = "waiting_for_stragglers"
CONTAINERS = (IDLE, STRAGGLERS, "collecting", "sampling", "collect", "evaluating")
"""Spans of such lanes that are around what others do."""


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


def use_of(process: str, lane: str) -> str:
    """What a lane is for, COLLECTING or EVALUATION; empty for every other."""
    uses = (use for use, begins in LANES.items() if process == FLOW and re.match(begins, lane))
    return next(uses, "")
