"""Prompts to check servers on, from an environment that follows a plan."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from rollmill.flows.policies.server_parity import MAX_PASSED_OVER, Opening, Openings
from rollmill.tasks.errors import EpisodeError, ServiceDiedError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Example, Message

HANG = TimeoutError("a mark, never raised: the environment hangs")


class PlannedEpisode:
    """Says its number and a sum, or raises, or hangs."""

    def __init__(
        self, number: int, reply: Exception | None, close: Exception | None, closed: list[int]
    ) -> None:
        self.number, self.reply_error, self.close_error, self.closed = number, reply, close, closed

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        await act(self.reply_error)
        return (Message("user", f"{self.number}+1="),)

    async def close(self) -> Mapping[str, object]:
        self.closed.append(self.number)
        await act(self.close_error)
        return {}


async def act(error: Exception | None) -> None:
    if error is HANG:
        await asyncio.sleep(60)
    if error is not None:
        raise error


class Planned:
    """An environment; its plans say what becomes of problems, by their number."""

    name, tools, stop = "planned", (), ()

    def __init__(
        self,
        replies: Mapping[int, Exception] | None = None,
        *,
        examples: Mapping[int, Exception] | None = None,
        closes: Mapping[int, Exception] | None = None,
        size: int = 40,
    ) -> None:
        self.replies, self.examples, self.closes = replies or {}, examples or {}, closes or {}
        self.n_problems = size
        self.closed: list[int] = []

    def size(self, split: str) -> int:
        return self.n_problems

    async def example(self, split: str, index: int) -> Example:
        await act(self.examples.get(index))
        return Example(str(index), {})

    def episode(self, example: Example, seed: int) -> PlannedEpisode:
        number = int(example.example_id)
        return PlannedEpisode(number, self.replies.get(number), self.closes.get(number), self.closed)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return ChatTokenizer.load(save_character_tokenizer(folder))


async def first(
    n: int, environment: Planned, tokenizer: ChatTokenizer, max_tokens: int = 64
) -> Sequence[Opening]:
    with disable_run_logger():
        return await Openings(environment, tokenizer, max_tokens, timeout_s=0.05).first(n)


def numbers(openings: Sequence[Opening]) -> list[int]:
    return [int(opening.messages[0].content.partition("+")[0]) for opening in openings]


async def test_the_first_openings_are_given_with_their_tokens_and_closed(tokenizer: ChatTokenizer) -> None:
    environment = Planned()
    openings = await first(3, environment, tokenizer)
    assert numbers(openings) == environment.closed == [0, 1, 2]
    assert openings[1].token_ids.tolist() == tokenizer.encode(openings[1].messages).tolist()


@pytest.mark.parametrize("what", ["replies", "examples", "closes"])
@pytest.mark.parametrize("error", [KeyError("x"), HANG])
async def test_a_problem_that_raises_or_hangs_is_passed_over(
    what: str, error: Exception, tokenizer: ChatTokenizer
) -> None:
    assert numbers(await first(2, Planned(**{what: {0: error}}), tokenizer)) == [1, 2]


async def test_an_episode_is_closed_though_its_opening_failed(tokenizer: ChatTokenizer) -> None:
    environment = Planned({0: KeyError("x")})
    await first(1, environment, tokenizer)
    assert environment.closed == [0, 1]


async def test_of_a_longer_opening_the_end_is_compared_where_rollouts_keep_the_end(
    tokenizer: ChatTokenizer,
) -> None:
    whole = (await first(1, Planned(), tokenizer))[0]
    with disable_run_logger():
        (cut,) = await Openings(Planned(), tokenizer, 4, timeout_s=0.05, kept_tokens=3).first(1)
    assert cut.token_ids.tolist() == whole.token_ids[-3:].tolist()
    assert len(whole.token_ids) >= 4
    assert cut.messages == whole.messages


async def test_an_opening_that_no_server_has_room_for_is_passed_over(tokenizer: ChatTokenizer) -> None:
    length = len((await first(11, Planned(), tokenizer))[10].token_ids)
    openings = await first(11, Planned(), tokenizer, max_tokens=length)
    assert numbers(openings) == list(range(10))


async def test_an_environment_that_always_fails_is_named_with_the_problem_and_the_cause(
    tokenizer: ChatTokenizer,
) -> None:
    cause = KeyError("no such column")
    environment = Planned(dict.fromkeys(range(40), cause))
    with pytest.raises(
        EpisodeError, match=r"planned: .*problem 16 failed: KeyError: .*no such column"
    ) as raised:
        await first(1, environment, tokenizer)
    assert raised.value.__cause__ is cause
    assert len(environment.closed) == MAX_PASSED_OVER + 1


async def test_an_environment_whose_few_problems_all_hang_is_an_error_with_the_limit(
    tokenizer: ChatTokenizer,
) -> None:
    with pytest.raises(EpisodeError, match=r"problem 1 failed: .*rollout\.env_timeout_s = 0\.05 s"):
        await first(1, Planned(dict.fromkeys(range(2), HANG), size=2), tokenizer)


async def test_the_end_of_the_environments_workers_is_no_failure_of_a_problem(
    tokenizer: ChatTokenizer,
) -> None:
    with pytest.raises(ServiceDiedError):
        await first(1, Planned({0: ServiceDiedError("environment", "gone")}), tokenizer)
