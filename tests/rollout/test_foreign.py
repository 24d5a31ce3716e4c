"""Environments that misbehave: each of their trajectories is a row, and says why."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.tasks.errors import WorkerKilledError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Example, Message, Split
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest, rollout_rows
from rollmill.tasks.rollout.trajectory_requests import plan_group_requests
from rollmill.tasks.store.run.step_plan import Attempt


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def make_raising(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


class Misbehaving:
    """An environment, and its episode, that misbehaves in one given method."""

    name = "misbehaving"
    tools = ()
    stop = ()

    def __init__(self, place: str, act: Callable[[], Any]) -> None:
        self._acts = {place: act}

    def size(self, split: Split) -> int:
        return 4

    async def example(self, split: Split, index: int) -> Example:
        return self._at("example", Example(str(index), {"problem": "1+1="}))

    def episode(self, example: Example, seed: int) -> "Misbehaving":
        return self._at("episode", self)

    async def reply(self, messages: object) -> Any:
        return () if messages else self._at("reply", (Message("user", "1+1="),))

    async def close(self) -> Mapping[str, object]:
        return self._at("close", {})

    def _at(self, place: str, usual: Any) -> Any:
        return self._acts[place]() if place in self._acts else usual


class Answering:
    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        return SampledTokens(
            np.array([4, 1], np.int32), np.zeros(2, np.float32), [(0, 0)], "stop", "http://server"
        )


async def row_of(environment: Misbehaving, folder: Path) -> dict[str, Any]:
    tokenizer = ChatTokenizer.load(save_character_tokenizer(folder))
    player = EpisodePlayer(
        environment, tokenizer, Answering(), max_tokens=64, timeout_s=60.0, cut_grace_s=60.0
    )
    (work,) = await plan_group_requests(
        environment, run="r", seed=0, group=0, attempts=[Attempt(0, 0, 0)], temperature=1.0, timeout_s=60.0
    )
    row: dict[str, Any] = rollout_rows("r", 0, environment.name, [await player.play(work)]).to_pylist()[0]
    return row


async def hang() -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("place", ["example", "episode", "reply", "close"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no such problem"), "ValueError"),
        (SystemExit(3), "SystemExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (UnprintableError(), "UnprintableError"),
        (ValueError("half a character \ud800"), "ValueError"),
    ],
    ids=["error", "exit", "cancelled", "unprintable", "surrogate"],
)
async def test_any_exception_of_an_environment_is_a_failed_row(
    tmp_path: Path, place: str, error: BaseException, kind: str
) -> None:
    row = await row_of(Misbehaving(place, make_raising(error)), tmp_path)
    assert (row["status"], row["error_type"]) == ("failed", kind)


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("example", "a problem"),
        ("example", Example("0", {"problem": {1, 2}})),
        ("reply", "hello"),
        ("reply", ["hello"]),
        ("reply", [{"role": "user", "content": "hello"}]),
        ("reply", [Message("user", 7)]),  # type: ignore[arg-type]
        ("reply", None),
        ("close", None),
        ("close", {"reward": np.float32(1)}),
    ],
)
async def test_an_invalid_message_problem_or_outcome_is_a_failed_row(
    tmp_path: Path, place: str, given: object
) -> None:
    row = await row_of(Misbehaving(place, lambda: given), tmp_path)
    assert (row["status"], row["error_type"]) == ("failed", "EpisodeError")
    assert row["error"]


async def test_an_environment_that_behaves_is_complete(tmp_path: Path) -> None:
    assert (await row_of(Misbehaving("", lambda: None), tmp_path))["status"] == "complete"


@pytest.mark.parametrize(("n_kills", "ended"), [(1, ("complete", "")), (2, ("failed", "WorkerKilledError"))])
@pytest.mark.parametrize("place", ["reply", "close"])
async def test_an_episode_whose_worker_is_killed_is_played_once_more(
    tmp_path: Path, place: str, n_kills: int, ended: tuple[str, str]
) -> None:
    kills = iter(range(n_kills))

    def act() -> object:
        if next(kills, None) is not None:
            raise WorkerKilledError("worker 0 ended with signal SIGKILL")
        return (Message("user", "1+1="),) if place == "reply" else {}

    row = await row_of(Misbehaving(place, act), tmp_path)
    assert (row["status"], row["error_type"]) == ended
    assert len(row["turn_starts"]) == int(ended[0] == "complete" or place == "close")


async def test_a_cancelled_player_stays_cancelled_whatever_the_environment_raises(tmp_path: Path) -> None:
    environment = Misbehaving("", lambda: None)
    environment.reply = lambda messages: hang()  # type: ignore[method-assign]
    playing = asyncio.ensure_future(row_of(environment, tmp_path))
    await asyncio.sleep(0.05)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
