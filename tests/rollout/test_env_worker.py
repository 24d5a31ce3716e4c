"""What an environment does in a worker process comes back as an answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from rollmill.tasks.errors import ForeignError
from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, TokenCounts
from rollmill.tasks.rollout.environment_messages import TurnReply, TurnRequest
from rollmill.tasks.rollout.environment_worker import OpenEpisodes

TURN = TurnRequest(1, Example("e", {}), 0, ())


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


class Acting:
    """Its one episode acts at its reply and at its close."""

    name, tools, stop = "acting", (), ()

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.n_closed = act, 0

    def size(self, split: Split) -> int:
        return 1

    async def example(self, split: Split, index: int) -> Example:
        return Example("", {})

    def episode(self, example: Example, seed: int) -> Episode:
        return ActingEpisode(self)


class ActingEpisode:
    def __init__(self, environment: Acting) -> None:
        self.environment = environment

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        given = self.environment.act()
        await asyncio.sleep(0)
        return given  # type: ignore[return-value] # that is the misdeed

    async def close(self) -> Mapping[str, object]:
        self.environment.n_closed += 1
        self.environment.act()
        await asyncio.sleep(0)
        return {}


def make_raising(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def cancel_itself() -> object:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel()


MISDEEDS: Mapping[str, tuple[Callable[[], object], str, str]] = {
    "exit": (make_raising(SystemExit(3)), "SystemExit", "3"),
    "cancelled": (make_raising(asyncio.CancelledError()), "CancelledError", "cancelled"),
    "cancels itself": (cancel_itself, "CancelledError", "cancelled"),
    "base": (make_raising(BaseException("odd")), "BaseException", "odd"),
    "surrogate": (make_raising(ValueError("\ud800")), "ValueError", "?"),
    "mute": (make_raising(MuteError()), "MuteError", "its text raised KeyError"),
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_an_exception_of_an_environment_is_a_failed_answer_and_its_episode_is_closed(
    misdeed: str,
) -> None:
    act, kind, text = MISDEEDS[misdeed]
    environment = Acting(act)
    with pytest.raises(ForeignError) as raised:
        await OpenEpisodes(environment).reply(TURN)
    assert (raised.value.kind, environment.n_closed) == (kind, 1)
    assert text in raised.value.text


@pytest.mark.parametrize("given", [5, ["text"], [Message("robot", "x")], [Message("user", "\ud800")]])  # type: ignore[arg-type]
async def test_a_reply_that_is_no_messages_is_a_failed_answer_and_its_episode_is_closed(
    given: object,
) -> None:
    environment = Acting(lambda: given)
    with pytest.raises(ForeignError):
        await OpenEpisodes(environment).reply(TURN)
    assert environment.n_closed == 1


@pytest.mark.parametrize("misdeed", MISDEEDS)
async def test_an_exception_at_the_close_is_a_failed_answer(misdeed: str) -> None:
    environment = Acting(lambda: ())
    episodes = OpenEpisodes(environment)
    assert await episodes.reply(TURN) == TurnReply(())
    environment.act, kind, _ = MISDEEDS[misdeed]
    closed = await episodes.close(1)
    assert closed.raised is not None
    assert closed.raised[0] == kind


async def test_an_abandoned_request_is_cancelled() -> None:
    episodes = OpenEpisodes(Acting(lambda: ()))
    asking = asyncio.create_task(episodes.reply(TURN))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_an_episode_is_given_the_token_counts_before_its_reply() -> None:
    class Counting(ActingEpisode):
        def take_counts(self, counts: TokenCounts) -> None:
            taken.append(counts)

        async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
            taken.append(len(messages))
            return ()

    taken: list[object] = []
    environment = Acting(list)
    environment.episode = lambda example, seed: Counting(environment)  # type: ignore[method-assign]
    opened = OpenEpisodes(environment)
    await opened.reply(TURN)
    said = (Message("user", "1+1="), Message("assistant", "2"))
    await opened.reply(TurnRequest(1, Example("e", {}), 0, said, TokenCounts(4, 2)))
    assert taken == [0, TokenCounts(4, 2), 2]
