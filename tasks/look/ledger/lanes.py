"""Parse the names of the flow's lanes: their group, trajectory and purpose."""

import re
from typing import NamedTuple

from rollmill.tasks.look.ledger.span_timeline import FLOW, IDLE

COLLECTING, EVALUATION = "collecting", "evaluation"
"""Purposes of the flow's lanes: a step's groups and trajectories, and an evaluation."""
LANES = {COLLECTING: r"\d|collect\.", EVALUATION: r"v\d|evaluate\."}
"""Prefix of an evaluation's lanes."""
STRAGGLERS = "waiting_for_stragglers"
CONTAINERS = (IDLE, STRAGGLERS, "collecting", "sampling", "collect", "evaluating")
"""Spans in these lanes that enclose the work of other lanes."""


class LaneFamily(NamedTuple):
    """The group or evaluation that a lane belongs to.

    Attributes:
        family: number of the group, or `v` and the version of the evaluation; empty for neither.
        is_part: True for the lane of a trajectory, and for lanes of ranks and servers.
    """

    family: str
    is_part: bool


def family_from_lane(process: str, lane: str) -> LaneFamily:
    """Return the group or evaluation that a lane belongs to; `family` is empty if it belongs to none."""
    found = re.match(r"(?:evaluate\.|v)(\d+)|(\d+)", lane) if process == FLOW else None
    if found is None:
        return LaneFamily("", is_part=process != FLOW)
    is_part = lane.startswith("v") or bool(re.match(r"\d+\.", lane))
    return LaneFamily(found[0] if found[2] else f"v{found[1]}", is_part)


def use_from_lane(process: str, lane: str) -> str:
    """Return what a lane of the flow is for, COLLECTING or EVALUATION; empty for all other lanes."""
    uses = (use for use, begins in LANES.items() if process == FLOW and re.match(begins, lane))
    return next(uses, "")
