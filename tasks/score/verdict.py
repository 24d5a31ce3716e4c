"""The result of scoring one trajectory, whatever its scorer did."""

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsFloat, SupportsIndex

from rollmill.tasks.errors import VerdictError, printable, user_error_text
from rollmill.tasks.score.scorer import DropGroup, Dropped, Reward

# The column `subgroup` is an int32.
MAX_SUBGROUP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ScoreVerdict:
    """Result of scoring one trajectory: a row of `scores` without its trajectory id.

    Attributes:
        reward: NaN unless `status` is scored.
        turn_rewards: [turns]; empty: the scorer gave none.
        token_rewards: [n_completion_tokens]; empty: the scorer gave none.
        error: text of the error; the reason if `status` is dropped.
        duration_s: seconds that the scorer took; for a group scorer, over the whole group.
    """

    status: Literal["scored", "failed", "dropped"]
    reward: float = math.nan
    components: Mapping[str, float] = field(default_factory=dict)
    subgroup: int = 0
    turn_rewards: tuple[float, ...] = ()
    token_rewards: tuple[float, ...] = ()
    error_type: str = ""
    error: str = ""
    duration_s: float = 0.0


def verdict_from_error(error: BaseException, duration_s: float = 0.0) -> ScoreVerdict:
    """Return the failed verdict for a scorer's exception; the text has file and line if user code raised it."""
    return ScoreVerdict(
        "failed", error_type=type(error).__name__, error=user_error_text(error), duration_s=duration_s
    )


def call_scorer(n: int, by_group: bool, score: Callable[[], object]) -> list[ScoreVerdict]:
    """Call a scorer for `n` candidates and return one verdict for each, also if it fails."""
    started = time.perf_counter()
    try:
        verdicts = verdicts_from_result(score(), n, by_group=by_group)
    except Exception as error:  # noqa: BLE001 - scorers are foreign code: a failed score is data
        verdicts = [verdict_from_error(error)] * n
    return set_duration(verdicts, time.perf_counter() - started)


def set_duration(verdicts: Sequence[ScoreVerdict], duration_s: float) -> list[ScoreVerdict]:
    """Return copies of the verdicts with `duration_s` set."""
    return [replace(verdict, duration_s=duration_s) for verdict in verdicts]


def verdicts_from_result(given: object, n: int, *, by_group: bool) -> list[ScoreVerdict]:
    """Convert a scorer's result for `n` candidates to verdicts; an invalid item becomes a failed verdict among the others.

    Example: a group scorer that returned [1, Dropped("too long")] for two candidates gives a scored and a dropped verdict.

    Raises:
        VerdictError: a group scorer returned no sequence, or one of another length.
    """
    if not by_group:
        return [_verdict_from_result(given)]
    if isinstance(given, DropGroup):
        return [_verdict_from_result(Dropped(given.reason))] * n
    found = _sequence(f"DropGroup or {n} verdicts from a group's scorer", given)
    if len(found) != n:
        raise VerdictError(f"expected {n} verdicts from a group's scorer, one a candidate, got {len(found)}")
    return [_verdict_from_result(each) for each in found]


def _verdict_from_result(given: object) -> ScoreVerdict:
    try:
        if isinstance(given, Dropped):
            return ScoreVerdict("dropped", error=printable(str(given.reason)))
        reward = given if isinstance(given, Reward) else Reward(_number("a reward", given))
        components = {
            printable(str(name)): _number(f"component {name}", value)
            for name, value in reward.components.items()
        }
        if reward.turns is not None and reward.tokens is not None:
            raise VerdictError("expected rewards of turns or of tokens, got both")
        turns = _numbers("turns", () if reward.turns is None else reward.turns)
        tokens = _numbers("tokens", () if reward.tokens is None else reward.tokens)
        has_positions = reward.turns is not None or reward.tokens is not None
        value = math.fsum(turns or tokens) if reward.value is None and has_positions else reward.value
        return ScoreVerdict(
            "scored", _number("a reward", value), components, _subgroup(reward.subgroup), turns, tokens
        )
    except Exception as error:  # noqa: BLE001 - what a scorer gave is foreign: its attributes may raise
        return verdict_from_error(error)


def _number(what: str, value: object) -> float:
    if not isinstance(value, SupportsFloat):
        raise VerdictError(f"expected a number as {what}, got {_show(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise VerdictError(f"expected a finite number as {what}, got {number}")
    return number


def _sequence(expected: str, given: object) -> Sequence[Any]:
    # An array of numpy or torch, without an import of either.
    if not isinstance(given, Sequence) and hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise VerdictError(f"expected {expected}, got {_show(given)}")
    return given


def _numbers(what: str, given: object) -> tuple[float, ...]:
    values = _sequence(f"a sequence of numbers as {what}", given)
    # One type is the usual case: thousands of tokens are checked at once.
    if all(type(each) is float for each in values) and all(map(math.isfinite, values)):
        return tuple(values)
    return tuple(_number(f"a reward in {what}", each) for each in values)


def check_positions(verdict: ScoreVerdict, n_turns: int, n_tokens: int) -> ScoreVerdict:
    """Return the verdict, or a failed one if it has not one reward for each turn or token of a trajectory with so many."""
    for what, rewards, n in (
        ("turns", verdict.turn_rewards, n_turns),
        ("tokens", verdict.token_rewards, n_tokens),
    ):
        if rewards and len(rewards) != n:
            remedy = "" if n_turns or not n_tokens else " (an older Rollmill stored it, without its turns)"
            error = VerdictError(f"expected {n} rewards of {what}{remedy}, got {len(rewards)}")
            return verdict_from_error(error, verdict.duration_s)
    return verdict


def _subgroup(value: object) -> int:
    if not isinstance(value, SupportsIndex) or not 0 <= operator.index(value) <= MAX_SUBGROUP:
        raise VerdictError(f"expected 0 or a positive whole number as subgroup, got {_show(value)}")
    return operator.index(value)


def _show(value: object) -> str:
    return f"{type(value).__name__} {value!r:.200}"
