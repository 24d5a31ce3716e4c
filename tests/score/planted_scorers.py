"""Scorers that behave and misbehave; found by import path, in worker processes too."""

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.tasks.score.advantages import Advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scorer import Candidate, DropGroup, Dropped, Reward, by_group


def length(candidate: Candidate) -> float:
    return len(candidate.answer)


async def waits(candidate: Candidate) -> Reward:
    await asyncio.sleep(0)
    return Reward(1.0, {"tokens": candidate.n_completion_tokens})


def act(candidate: Candidate) -> object:  # noqa: C901 - a list of misdeeds
    """Do what the answer says."""
    match candidate.answer:
        case "raise":
            raise KeyError("answer")
        case "hang":
            time.sleep(1000)
        case answer if answer.startswith("hang beside "):
            Path(answer.removeprefix("hang beside ")).touch()
            time.sleep(1000)
        case answer if answer.startswith("killed once beside "):
            beside = Path(answer.removeprefix("killed once beside "))
            if not beside.exists():
                beside.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "sys.exit":
            raise SystemExit(4)
        case "real-time signal":
            os.kill(os.getpid(), 35)
        case "nan":
            return float("nan")
        case "text":
            return "0.5"
        case "nothing":
            return None
        case "component":
            return Reward(1.0, {"part": float("inf")})
        case "drop":
            return Dropped("too long")
        case "surrogate":
            raise ValueError("\ud800")
        case "print":
            print("hello")  # noqa: T201 - that is the misdeed
            return 1.0
        case "child":
            child = subprocess.Popen(["sleep", "1000"])
            return Reward(1.0, {"pid": child.pid})
        case "pid":
            return os.getpid()
    return 1.0


async def act_async(candidate: Candidate) -> object:
    match candidate.answer:
        case "hang":
            await asyncio.sleep(1000)
        case "timeout":
            raise TimeoutError("the scorer's own")
        case "cancel":
            raise asyncio.CancelledError
        case "cancel itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        case "base":
            raise BaseException("odd")
    return act(candidate)


class ClosesSlowly:
    name, version = "closes_slowly", "1"

    async def score(self, candidate: Candidate) -> float:
        return 1.0

    async def close(self) -> None:
        await asyncio.sleep(1000)


def by_turn(candidate: Candidate) -> Reward:
    """The numbers that the answer says are the rewards of turns."""
    return Reward(turns=[float(each) for each in candidate.answer.split()])


async def by_token(candidate: Candidate) -> Reward:
    return Reward(tokens=[2.0] * candidate.n_completion_tokens)


class Graded:
    name, version = "graded", "7"

    def score(self, candidate: Candidate) -> Reward:
        return Reward(0.5, {"half": 0.5})


class Configured:
    """Gives the number that its settings hold, in a worker too."""

    name, version = "configured", "1"

    def __init__(self, reward: float) -> None:
        self.reward = reward

    @classmethod
    def from_config(cls, config: ScoreConfig) -> "Configured":
        return cls(config.judge.score_range[1])

    def score(self, candidate: Candidate) -> float:
        return self.reward


class Slots:
    """Counts its calls at the same time."""

    name, version = "slots", "1"
    now = most = 0

    async def score(self, candidate: Candidate) -> float:
        type(self).now += 1
        type(self).most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        type(self).now -= 1
        return 0.0


@by_group
def ranks(candidates: Sequence[Candidate]) -> list[float]:
    """The longer, the better."""
    order = sorted(range(len(candidates)), key=lambda i: len(candidates[i].answer))
    return [float(order.index(i)) for i in range(len(candidates))]


@by_group
def splits(candidates: Sequence[Candidate]) -> list[Reward | Dropped] | DropGroup:
    """Even and odd lengths apart; nothing empty; no group of one."""
    if len(candidates) == 1:
        return DropGroup("alone")
    return [
        Reward(1.0, subgroup=len(each.answer) % 2) if each.answer else Dropped("empty") for each in candidates
    ]


@by_group
async def short(candidates: Sequence[Candidate]) -> list[float]:
    return [1.0]


class CannotBeMade:
    def __init__(self, argument: int) -> None: ...


class OnlyHere:
    """Cannot be made in a worker process, whose main module is its own."""

    name, version = "only_here", "1"

    def __init__(self) -> None:
        import __main__

        if "rollmill.tasks.score.score_worker" in str(getattr(__main__.__spec__, "name", "")):
            raise RuntimeError("not in a worker")

    def score(self, candidate: Candidate) -> float:
        return 0.0


def twice(rewards):
    return [2 * reward for reward in rewards]


def too_few(rewards):
    return [0.0]


def not_finite(rewards):
    return rewards * float("nan")


def doubles_in_place(rewards):
    rewards *= 2
    return rewards


CENTRED = Advantage(
    lambda rewards: rewards, lambda advantages, _: advantages - advantages.mean(), needs_spread=False
)
OVERFLOWS = Advantage(lambda rewards: rewards, lambda advantages, _: advantages * 1e39)


FLAT_BY_POSITION = Advantage(lambda rewards: rewards, by_position=lambda rewards, present: rewards.ravel())
NOT_BY_COLUMN = Advantage(lambda rewards: rewards - rewards.mean(), takes_columns=True)
NOT_OF_ONE = Advantage(
    lambda rewards: rewards * np.float64(1.0) / (len(rewards) - np.float64(1.0)), needs_spread=False
)


class Counts:
    """Keeps state: its reward is the number of calls so far."""

    name, version = "counts", "1"

    def __init__(self) -> None:
        self.calls = 0

    def score(self, candidate: Candidate) -> float:
        self.calls += 1
        return self.calls


class Novel:
    """Keeps state: an answer has a reward only the first time."""

    name, version = "novel", "1"

    def __init__(self) -> None:
        self.seen: set[str] = set()

    async def score(self, candidate: Candidate) -> float:
        is_new = candidate.answer not in self.seen
        self.seen.add(candidate.answer)
        return float(is_new)


def fails_at_times(candidate: Candidate) -> float:
    if candidate.answer == "raise":
        raise KeyError("answer")
    return float(candidate.trajectory_id.split(".")[2])


def scaled(candidate: "Unknown", *, n: int, names: tuple[str, ...] = ()) -> float:  # type: ignore[name-defined] # noqa: F821
    """An annotation that cannot be evaluated is no obstacle."""
    return float(n * len(names))


async def scaled_async(candidate: Candidate, *, n: int, names: tuple[str, ...] = ()) -> float:
    return float(n * len(names))


@by_group
def scaled_group(candidates: list[Candidate], *, n: int, names: tuple[str, ...] = ()) -> list[float]:
    return [float(n * len(names))] * len(candidates)


class Scaled:
    name, version = "scaled", "3"

    def __init__(self, n: int, names: tuple[str, ...] = ()) -> None:
        self.n, self.names = n, names

    def score(self, candidate: Candidate) -> float:
        return float(self.n * len(self.names))


class _Object:
    async def __call__(self, candidate: Candidate, *, n: int, names: tuple[str, ...] = ()) -> float:
        return float(n * len(names))


an_object = _Object()


def takes_all(candidate: Candidate, **arguments: Any) -> float:
    return float(arguments["n"] * len(arguments["names"]))
