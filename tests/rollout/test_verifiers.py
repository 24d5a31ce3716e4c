"""Environments of the verifiers library: one task set of ours with every way to misbehave."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout import environment as environments
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Conversation, Message, TokenCounts
from rollmill.tasks.rollout.environment_calls import read_episode_state
from rollmill.tasks.rollout.environments.endpoint.requesting_episode import RequestingEpisode
from rollmill.tasks.rollout.environments.verifiers.loading import check_installed, parse_state_columns
from rollmill.tasks.rollout.environments.verifiers.verifiers_environment import Verifiers

# The library takes eight seconds to import, and it starts further processes.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAME = "counting_house"
TILL_CALL = '<tool_call>{"name": "till_ring_up", "arguments": {"coins": %d}}</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        inherited = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [inherited])]))
        yield
    sys.modules.pop(NAME, None)


def make_environment(**taskset: object) -> Verifiers:
    return Verifiers(NAME, {"taskset": taskset})


@pytest.fixture
async def house() -> AsyncIterator[Verifiers]:
    environment = make_environment()
    yield environment
    await environment.aclose()


async def open_episode(environment: Verifiers, index: int = 0) -> tuple[RequestingEpisode, list[Message]]:
    episode = environment.episode(await environment.example("train", index), 0)
    return episode, list(await episode.reply(()))


async def say(episode: RequestingEpisode, messages: list[Message], text: str) -> Sequence[Message]:
    messages.append(Message("assistant", text))
    new = await episode.reply(messages)
    messages.extend(new)
    return new


async def play(environment: Verifiers, index: int = 0) -> Mapping[str, object]:
    """An episode with the right answer, from its opening to its outcome."""
    episode, messages = await open_episode(environment, index)
    assert not await say(episode, messages, str(int(messages[0].content.split("+")[0]) + 1))
    return await episode.close()


async def test_problems_are_split_by_their_content(house: Verifiers) -> None:
    sizes = house.size("train"), house.size("held_out")
    assert sum(sizes) == 10
    splits = [
        [await house.example(split, i) for i in range(house.size(split))] for split in ("train", "held_out")
    ]
    ids = [{example.example_id for example in each} for each in splits]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 10
    again = make_environment()
    assert await again.example("train", 0) == splits[0][0]
    assert splits[0][0].content["task"]["answer"] == str(int(splits[0][0].example_id) + 1)


async def test_held_out_problems_may_be_a_separate_task_set() -> None:
    environment = Verifiers(NAME, {"taskset": {"n": 10}, "held_out": {"n": 3}, "select": {"limit": 7}})
    assert (environment.size("train"), environment.size("held_out")) == (7, 3)


async def test_the_environments_own_rewards_are_the_outcome(house: Verifiers) -> None:
    outcome = await play(house)
    assert outcome["reward"] == 1.5
    assert outcome["rewards"] == {"right": 1.0, "short": 0.5}
    assert outcome["metrics"] == {"in_the_till": 0.0}
    assert outcome["version"] == "verifiers 0.4.0"


async def test_turns_add_to_one_conversation(house: Verifiers) -> None:
    episode, messages = await open_episode(house)
    assert await say(episode, messages, "again") == (Message("user", "and now?"),)
    assert await say(episode, messages, "<think>so</think> again") == (Message("user", "and now?"),)
    assert await say(episode, messages, "wrong") == ()
    assert (await episode.close())["rewards"] == {"right": 0.0, "short": 0.0}


async def test_fifty_concurrent_episodes_do_not_mix(house: Verifiers) -> None:
    outcomes = await asyncio.gather(*(play(house, i % house.size("train")) for i in range(50)))
    assert [outcome["reward"] for outcome in outcomes] == [1.5] * 50


async def test_the_librarys_limit_of_tokens_applies_to_those_that_were_sampled() -> None:
    environment = Verifiers(NAME, {"agent": {"max_output_tokens": 5}})
    episode, messages = await open_episode(environment)
    for counts, is_over in ((TokenCounts(9, 3), False), (TokenCounts(15, 2), True)):
        episode.take_counts(counts)
        assert bool(await say(episode, messages, "again")) is not is_over
    outcome = await episode.close()
    await environment.aclose()
    assert outcome["stop"] == "max_output_tokens"


async def test_a_cancelled_episode_is_scored_as_it_is(house: Verifiers) -> None:
    episode, messages = await open_episode(house)
    await say(episode, messages, "again")
    outcome = await episode.close()
    assert (outcome["reward"], outcome["rewards"]) == (0.0, {"right": 0.0, "short": 0.0})
    assert len(asyncio.all_tasks()) <= 3  # this one, and the shared endpoint


async def test_an_episode_that_never_opened_has_no_outcome(house: Verifiers) -> None:
    assert await house.episode(await house.example("train", 0), 0).close() == {}


@pytest.mark.parametrize(
    ("misbehave", "message"),
    [
        ("setup", "never requested a completion: TaskError: task setup: RuntimeError: the house is closed"),
        ("broken", "EnvError: House.run.*RuntimeError: the counter fell over"),
        ("second role", "more than one role"),
    ],
)
async def test_an_error_of_an_environment_is_raised_by_its_episode(misbehave: str, message: str) -> None:
    environment = make_environment(misbehave=misbehave)
    episode = environment.episode(await environment.example("train", 0), 0)
    try:
        with pytest.raises(EpisodeError, match=message):
            await say(episode, list(await episode.reply(())), "1")
    finally:
        await episode.close()
        await environment.aclose()


async def test_an_episode_whose_scoring_failed_has_the_error_for_a_reward() -> None:
    environment = make_environment(misbehave="scoring")
    outcome = await play(environment)
    await environment.aclose()
    assert "reward" not in outcome
    assert outcome["error"] == "TaskError: task SumTask scoring: RuntimeError: the judge is out"


async def test_a_hanging_environment_leaves_nothing_behind_when_it_is_cancelled() -> None:
    environment = make_environment(misbehave="hanging")
    episode, messages = await open_episode(environment)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await say(episode, messages, "1")
    assert "during the environment's turn" in str((await episode.close())["error"])
    await environment.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_rewritten_conversation_replaces_the_one_so_far(house: Verifiers) -> None:
    episode, messages = await open_episode(house)
    episode._conversation[0] = {"role": "user", "content": "something else"}
    reply = await episode.reply([*messages, Message("assistant", "<think>so</think> again")])
    again = Message("assistant", "<think>so</think> again")
    assert reply == Conversation((*messages, again, Message("user", "and now?")))
    await episode.close()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("owner/no-such-house@1", {}, "install the environment's package"),
        (NAME, {"taskset": {"coins": 5}}, "rejects these arguments"),
        (NAME, {"select": {"first": 5}}, "select"),
        (NAME, {"taskset": {"n": 0}}, "no problems to train on"),
        ("json", {}, "JSONDecoder"),
        (NAME, {"agent": {"sampling": {"temperature": 0.1}}}, ""),
    ],
)
async def test_wrong_names_and_arguments_are_errors_of_the_configuration(
    name: str, arguments: dict[str, object], message: str
) -> None:
    config = RolloutConfig(environment={"name": f"verifiers:{name}", "args": arguments})
    if not message:
        environment = environments.make_environment(config)
        with pytest.raises(EpisodeError, match=r"temperature = 0\.1"):
            await open_episode(environment)
        await environment.aclose()
        return
    with pytest.raises(ConfigError, match=message):
        environments.make_environment(config)


def test_a_missing_requirement_is_named_without_importing_the_library() -> None:
    check_installed("verifiers:textarena")
    check_installed(f"verifiers:owner/{NAME.replace('_', '-')}@1.2")
    with pytest.raises(ConfigError, match="install the environment's package"):
        check_installed("verifiers:no-such-house")


@pytest.mark.service
async def test_tools_are_called_and_their_state_and_errors_come_back() -> None:
    environment = await asyncio.to_thread(make_environment, task={"has_till": True}, n=5)
    assert [tool["function"]["name"] for tool in environment.tools] == ["till_ring_up"]
    episode, messages = await open_episode(environment)
    try:
        for coins, message in (
            (3, "3 in the till"),
            (4, "7 in the till"),
            (-1, "takes coins"),
            (1, "8 in the till"),
        ):
            (answer,) = await say(episode, messages, f"so {TILL_CALL % coins}")
            assert answer.role == "tool"
            assert message in answer.content
        assert not await say(episode, messages, "1")
        assert (await episode.close())["metrics"] == {"in_the_till": 8.0}
    finally:
        await environment.aclose()


async def test_the_requested_fields_of_the_librarys_state_are_stored() -> None:
    states = parse_state_columns(("rung_up:int64", "artifacts"))
    environment = Verifiers(NAME, {}, states)
    episode, messages = await open_episode(environment)
    assert read_episode_state(environment, episode).values == {}
    await say(episode, messages, "1")
    await episode.close()
    kept = read_episode_state(environment, episode)
    await environment.aclose()
    assert kept.values == {"rung_up": 0, "artifacts": "{}"}


def test_states_of_no_type_are_refused_by_their_setting() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.keep_states.*expected one of"):
        parse_state_columns(("rung_up:integer",))
