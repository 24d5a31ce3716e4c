"""What a run takes beside its steps, as spans of the lane `main`: from the command to the first step, and after the last."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

import psutil

from tasks.observe.spans import P, Recorder, Result, TimedFunction, current_lane, recording

FLOW = "flow"
"""The process of a run's flow."""


@contextmanager
def command() -> Iterator[None]:
    """Record what a command does that runs a flow as the last thing of its process; it began when that did."""
    age_s = time.time() - psutil.Process().create_time()
    with recording(Recorder(FLOW, time.perf_counter_ns() - int(1e9 * age_s))):
        yield


def recorded(flow: TimedFunction[P, Result]) -> TimedFunction[P, Result]:
    """Record what a flow does, from its command on where there is one: until here that was `launching`."""

    @wraps(flow)
    async def begun(*args: P.args, **kwargs: P.kwargs) -> Result:
        if (lane := current_lane()) is None:
            with recording(Recorder(FLOW)):
                return await flow(*args, **kwargs)
        lane.add("launching", lane.recorder.began, time.perf_counter_ns())
        return await flow(*args, **kwargs)

    return begun


def recorder_here() -> Recorder:
    """The recorder of what goes on here, or a new one."""
    lane = current_lane()
    return lane.recorder if lane is not None else Recorder(FLOW)
