"""What became of one trajectory's score, however its scorer went."""

import math
import operator
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, SupportsFloat, SupportsIndex

from tasks.errors import RollmillError, VerdictError, printable, text_of
from tasks.score.scorer import DropGroup, Dropped, Reward

MAX_SUBGROUP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of `scores`, without whose it is.

    Attributes:
        reward: NaN unless `status` is scored.
        error: text of the error; the reason when `status` is dropped.
        duration_s: seconds that the scorer took, for a group's scorer over all of the group.
    """

    status: Literal["scored", "failed", "dropped"]
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    subgroup: int = 0
    error_type: str = ""
    error: str = ""
    duration_s: float = 0.0


def failed(error: BaseException, duration_s: float = 0.0) -> Verdict:
    """The verdict of a scorer that failed; an error that is not ours says where it was raised."""
    text = text_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, RollmillError):
        text = f"{text} ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})"
    return Verdict("failed", error_type=type(error).__name__, error=printable(text), duration_s=duration_s)


def judged(n: int, by_group: bool, score: Callable[[], object]) -> list[Verdict]:
    """Call a scorer for `n` candidates; whatever it does is a verdict for each."""
    started = time.perf_counter()
    try:
        verdicts = verdicts_of(score(), n, by_group=by_group)
    except Exception as error:  # noqa: BLE001 - scorers are foreign code: a failed score is data
        verdicts = [failed(error)] * n
    return lasting(verdicts, time.perf_counter() - started)


def lasting(verdicts: Sequence[Verdict], duration_s: float) -> list[Verdict]:
    """The same verdicts, with the time that they took."""
    return [replace(verdict, duration_s=duration_s) for verdict in verdicts]


def verdicts_of(given: object, n: int, *, by_group: bool) -> list[Verdict]:
    """What a scorer gave for `n` candidates, as verdicts; one that is wrong is a failed one among the others.

    Example: a group's scorer that gave [1, Dropped("too long")] for two candidates gives a scored and a
    dropped verdict.

    Raises:
        VerdictError: a group's scorer gave no sequence, or one of another length.
    """
    if not by_group:
        return [_verdict_of(given)]
    if isinstance(given, DropGroup):
        return [_verdict_of(Dropped(given.reason))] * n
    if not isinstance(given, Sequence) and hasattr(given, "tolist"):
        given = given.tolist()  # an array
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise VerdictError(f"expected DropGroup or {n} verdicts from a group's scorer, got {_shown(given)}")
    if len(given) != n:
        raise VerdictError(f"expected {n} verdicts from a group's scorer, one a candidate, got {len(given)}")
    return [_verdict_of(each) for each in given]


def _verdict_of(given: object) -> Verdict:
    try:
        if isinstance(given, Dropped):
            return Verdict("dropped", error=printable(str(given.reason)))
        reward = given if isinstance(given, Reward) else Reward(_number("a reward", given))
        components = {
            printable(str(name)): _number(f"component {name}", value)
            for name, value in reward.components.items()
        }
        return Verdict("scored", _number("a reward", reward.value), components, _subgroup(reward.subgroup))
    except Exception as error:  # noqa: BLE001 - what a scorer gave is foreign: its attributes may raise
        return failed(error)


def _number(what: str, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise VerdictError(f"expected a number as {what}, got {_shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise VerdictError(f"expected a finite number as {what}, got {number}")
    return number


def _subgroup(value: object) -> int:
    if not isinstance(value, SupportsIndex) or not 0 <= operator.index(value) <= MAX_SUBGROUP:
        raise VerdictError(f"expected 0 or a positive whole number as subgroup, got {_shown(value)}")
    return operator.index(value)


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r:.200}"
