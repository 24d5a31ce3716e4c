"""Episodes that drop or rewrite context: which segments their tokens are stored in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering_sampler import END, Answering
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_environments import Compacting, Rewriting, SubAgent

from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Conversation, Environment, Episode, Example, Message
from rollmill.tasks.rollout.environment_messages import TurnReply, TurnRequest
from rollmill.tasks.rollout.environment_worker import OpenEpisodes
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.environments.endpoint.chat_wire import Wire
from rollmill.tasks.rollout.environments.endpoint.requesting_episode import (
    AskPolicy,
    RequestingEpisode,
    RolloutEnd,
)
from rollmill.tasks.rollout.episode import EpisodePlayer
from rollmill.tasks.rollout.segment_builder import NO_LIMIT, RowLimit
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest, rollout_rows
from rollmill.tasks.store.segments import (
    Segment,
    find_fault,
    index_predecessors,
    index_sequences,
    list_conversations,
    read_segments,
)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "environments.md"
TEMPLATE = """
{%- for message in messages %}{{ '(' + message.role + ')' + message.content + '<eos>|' }}{% endfor %}
{%- if add_generation_prompt %}{{ '(assistant)' }}{% endif %}
"""
Reply = Sequence[Message] | Conversation


class Scripted(Addition):
    """An environment whose replies are prepared: each a function of the conversation, or what it returns."""

    def __init__(self, replies: Sequence[object]) -> None:
        self.replies = list(replies)

    def episode(self, example: Example, seed: int) -> Episode:
        return ScriptedEpisode(self.replies)


class ScriptedEpisode:
    def __init__(self, replies: Sequence[object]) -> None:
        self.replies = list(replies)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        made = self.replies.pop(0) if self.replies else ()
        found: Reply = made(messages) if callable(made) else made
        return found

    async def close(self) -> Mapping[str, object]:
        return {}


@pytest.fixture(scope="module", params=["without template", "with template"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = save_character_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    if request.param == "with template":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(folder)


@pytest.fixture
def plain(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(save_character_tokenizer(tmp_path))


async def play(
    tokenizer: ChatTokenizer,
    environment: Environment,
    said: Sequence[str],
    *,
    max_tokens: int = 512,
    row_limit: RowLimit = NO_LIMIT,
    keeps_routing: bool = False,
) -> tuple[Trajectory, Answering]:
    sampler = Answering(tokenizer, said)
    player = EpisodePlayer(environment, tokenizer, sampler, max_tokens, timeout_s=60.0, row_limit=row_limit)
    work = TrajectoryRequest("r.0.0.0", 0, 0, 0, Example("47+38", {"problem": "47+38="}), 3, 1.0)
    return await player.play(work, keeps_routing=keeps_routing), sampler


def check(trajectory: Trajectory, sampler: Answering) -> None:
    """Each completion is trained once, in a segment whose sequence is what the sampler had before it, with its values."""
    row = rollout_rows("r", 0, "env", [trajectory]).to_pylist()[0]
    tokens, mask, logprobs = (np.array(row[name]) for name in ("token_ids", "loss_mask", "logprobs"))
    segments = read_segments(row)
    assert segments == trajectory.segments
    assert not find_fault(segments, len(tokens))
    sequences = index_sequences(segments, len(tokens))
    starts, n_found = dict(zip(row["version_span_starts"], row["version_span_versions"], strict=True)), 0
    for number, (given_ids, ids) in enumerate(sampler.calls, start=1):
        n, end = len(given_ids), len(given_ids) + len(ids)
        holders = [
            each
            for each, segment in zip(sequences, segments, strict=True)
            if n >= segment.prefix_tokens
            and tokens[each][:end].tolist() == [*given_ids, *ids]
            and starts.get(int(each[n])) == number
        ]
        assert len(holders) == 1
        own = holders[0][n:end]
        assert mask[own].all()
        assert logprobs[own].tolist() == [-1.0 - place for place in range(len(ids))]
        n_found += len(ids)
    assert mask.sum() == n_found == row["n_completion_tokens"]
    turns = zip(row["turn_starts"], row["turn_tokens"], row["turn_messages"], strict=True)
    for (start, n, place), (_, ids) in zip(turns, sampler.calls, strict=True):
        assert tokens[start : start + n].tolist() == list(ids)
        assert mask[start : start + n].all()
        assert trajectory.messages[place].role == "assistant"
    assert len(set(sampler.seeds)) == len(sampler.seeds)
    assert (row["policy_version_first"], row["policy_version_last"]) == (1, len(sampler.calls))
    predecessors = index_predecessors(segments, len(tokens))
    for segment, each in zip(segments, sequences, strict=True):
        own = each[segment.prefix_tokens :]
        before = np.concatenate([[-1], each[:-1]])[segment.prefix_tokens :]
        assert predecessors[own].tolist() == before.tolist()


async def test_compacted_context_begins_segments_and_is_no_failure(tokenizer: ChatTokenizer) -> None:
    trajectory, sampler = await play(tokenizer, Compacting(), ["85", "97", "12"])
    assert (trajectory.status, len(trajectory.turns), len(trajectory.segments)) == ("complete", 3, 3)
    check(trajectory, sampler)
    said = list_conversations(trajectory.segments, trajectory.messages, trajectory.message_segments)
    assert [[each.role for each in of] for of in said] == [["user", "assistant"]] * 3
    assert [of[-1].content for of in said] == ["85", "97", "12"]


async def test_the_main_conversation_continues_in_its_segment_after_a_sub_agents(
    tokenizer: ChatTokenizer,
) -> None:
    trajectory, sampler = await play(tokenizer, SubAgent(), ["85", "20", "105"])
    check(trajectory, sampler)
    assert len(trajectory.segments) == 2
    # The first segment has two completions, the sampled end of the first one included.
    main = sampler.calls[2][0]
    assert main[: len(sampler.calls[0][0]) + 3] == [*sampler.calls[0][0], *sampler.calls[0][1]]
    assert trajectory.message_segments == (0, 0, 1, 1, 0, 0)
    assert [each.content for each in trajectory.messages if each.role == "assistant"] == ["85", "20", "105"]


async def test_a_rewritten_message_inherits_what_comes_before_the_change(plain: ChatTokenizer) -> None:
    trajectory, sampler = await play(plain, Rewriting(), ["85", "57", "9"])
    check(trajectory, sampler)
    # "47+38=" became "47+..=": three characters stay. Then "57" became "057", and the question before it stays.
    assert [each.prefix_tokens for each in trajectory.segments[:2]] == [0, 3]
    assert trajectory.segments[2][1:] == (1, len("47+38="), 1)
    assert (trajectory.token_ids == END).sum() == 3


async def test_the_same_conversation_again_is_sampled_with_another_seed(tokenizer: ChatTokenizer) -> None:
    def again(messages: Sequence[Message]) -> Conversation:
        return Conversation(messages[:1])

    opening = (Message("user", "1+1="),)
    trajectory, sampler = await play(tokenizer, Scripted([opening, again, again]), ["2", "3", "4"])
    check(trajectory, sampler)
    assert sampler.calls[0][0] == sampler.calls[1][0] == sampler.calls[2][0]
    n_opening = len(sampler.calls[0][0])
    assert [each[1:3] for each in trajectory.segments] == [(-1, 0), (0, n_opening), (0, n_opening)]
    assert len(trajectory.token_ids) == n_opening + 3 * 2


async def test_a_conversation_that_ends_with_the_policys_message_keeps_its_sampled_tokens(
    tokenizer: ChatTokenizer,
) -> None:
    trajectory, sampler = await play(
        tokenizer, Scripted([(Message("user", "1+1="),), Conversation]), ["2", "3"]
    )
    check(trajectory, sampler)
    (opening, first), (second, _) = sampler.calls
    assert second[: len(opening) + len(first)] == [*opening, *first]
    assert len(trajectory.segments) == 1


async def test_a_conversation_that_leaves_no_room_truncates_the_trajectory(tokenizer: ChatTokenizer) -> None:
    long = Conversation((Message("user", "9" * 600),))
    trajectory, sampler = await play(tokenizer, Scripted([(Message("user", "1+1="),), long]), ["2"])
    assert (trajectory.status, len(trajectory.segments), len(sampler.calls)) == ("truncated", 1, 1)
    check(trajectory, sampler)


async def test_segments_end_where_the_trainer_could_not_take_more(tokenizer: ChatTokenizer) -> None:
    def shorter(messages: Sequence[Message]) -> Conversation:
        return Conversation((Message("user", f"{len(messages[0].content)}+1="),))

    endless = Scripted([(Message("user", "1+1="),), *[shorter] * 100])
    trajectory, _ = await play(tokenizer, endless, ["2"], row_limit=RowLimit(122, 2))
    assert trajectory.status == "truncated"
    assert 2 < len(trajectory.segments) < 60
    assert len(trajectory.token_ids) <= 122
    n_packed = len(trajectory.segments)
    trajectory, _ = await play(tokenizer, endless, ["2"], row_limit=RowLimit(122, 2, is_padded=True))
    lengths = [len(each) for each in index_sequences(trajectory.segments, len(trajectory.token_ids))]
    assert trajectory.status == "truncated"
    assert 1 < len(lengths) < n_packed
    assert len(lengths) * max(lengths) <= 122
    linear = Scripted([(Message("user", "1+1="),), *[(Message("user", "1+1="),)] * 5])
    trajectory, _ = await play(tokenizer, linear, ["2"], row_limit=RowLimit(10, 2))
    assert (trajectory.status, len(trajectory.segments)) == ("complete", 1)


@pytest.mark.parametrize(
    ("replies", "error"),
    [
        ([(Message("user", "1?"),), Conversation(())], "the conversation from here on has no message"),
        ([(Message("user", "1?"),), Conversation((5,))], "expected a sequence of Message with text"),  # type: ignore[arg-type]
    ],
)
async def test_a_conversation_that_is_none_fails_the_trajectory(
    plain: ChatTokenizer, replies: list[Reply], error: str
) -> None:
    trajectory, _ = await play(plain, Scripted(replies), ["2"])
    assert (trajectory.status, trajectory.error_type) == ("failed", "EpisodeError")
    assert error in trajectory.error


@pytest.mark.parametrize("environment", [Compacting(), SubAgent(), Rewriting()], ids=lambda each: each.name)
async def test_every_stored_token_is_routed_once_but_the_last_of_each_segment(
    tokenizer: ChatTokenizer, environment: Environment
) -> None:
    trajectory, sampler = await play(tokenizer, environment, ["85", "57", "9"], keeps_routing=True)
    check(trajectory, sampler)
    experts = np.concatenate(trajectory.routed_experts)[:, 0, 0]
    expected = trajectory.token_ids % 5
    expected[[each.start - 1 for each in trajectory.segments[1:]]] = 0
    assert experts.tolist() == expected[:-1].tolist()


async def test_a_worker_says_that_a_conversation_is_replaced() -> None:
    said = (Message("user", "1?"),)
    episodes = OpenEpisodes(Scripted([said, Conversation(said)]))
    turn = TurnRequest(1, Example("e", {}), 0, ())
    assert (await episodes.reply(turn)).reply() == said
    second = await episodes.reply(replace_messages(turn, said))
    assert second == TurnReply(said, replaces=True)
    assert second.reply() == Conversation(said)


def replace_messages(turn: TurnRequest, messages: Sequence[Message]) -> TurnRequest:
    return TurnRequest(turn.episode, turn.example, turn.seed, messages)


MOVES = st.lists(
    st.tuples(st.sampled_from(["append", "cut", "rewrite", "fresh", "back", "again"]), st.integers(0, 9)),
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(moves=MOVES)
async def test_whatever_becomes_of_the_context_each_completion_is_stored_once(
    tokenizer: ChatTokenizer, moves: list[tuple[str, int]]
) -> None:
    seen: list[tuple[Message, ...]] = []

    def make(move: str, number: int) -> object:
        def reply(messages: Sequence[Message]) -> Reply:
            seen.append(tuple(messages))
            asked = Message("user", f"{number}?")
            if move == "append":
                return (asked,)
            if move == "cut":
                return Conversation((*messages[: number % len(messages)], asked))
            if move == "rewrite":
                place = number % len(messages)
                return Conversation(
                    (*messages[:place], replace(messages[place], content="7*"), *messages[place + 1 :], asked)
                )
            if move == "again":
                return Conversation(messages)
            if move == "fresh":
                return Conversation((asked,))
            return Conversation((*seen[number % len(seen)], asked))

        return reply

    replies = [(Message("user", "1+1="),), *(make(*each) for each in moves)]
    trajectory, sampler = await play(tokenizer, Scripted(replies), ["2", "31", "2"])
    assert (trajectory.status, len(trajectory.turns)) == ("complete", len(moves) + 1)
    check(trajectory, sampler)
    said = list_conversations(trajectory.segments, trajectory.messages, trajectory.message_segments)
    assert {tuple(each) for each in seen} <= {tuple(of[:n]) for of in said for n in range(len(of) + 1)}


class Requesting(Addition):
    """An environment of the verifiers library that sends these requests, each with a function of the messages said so far."""

    def __init__(self, requests: Sequence[Callable[[list[Wire]], list[Wire]]]) -> None:
        self.requests = requests

    def episode(self, example: Example, seed: int) -> Episode:
        async def run(ask: AskPolicy) -> RolloutEnd:
            said: list[Wire] = []
            for request in self.requests:
                said.append((await ask("trace", {"messages": request(said)})).message)
            return RolloutEnd({"reward": 1.0})

        return RequestingEpisode(run, ())


def user(text: str) -> Wire:
    return {"role": "user", "content": text}


async def test_a_verifiers_environment_that_rewrites_messages_begins_segments(plain: ChatTokenizer) -> None:
    environment = Requesting(
        [
            lambda said: [user("1+1=")],
            # It compacts its context, then returns to the first conversation, whose reasoning the library does not send.
            lambda said: [user("so far 2, 2+2=")],
            lambda said: [user("1+1="), {"role": "assistant", "content": said[0]["content"]}, user("+3=")],
            lambda said: [user("1+1="), {"role": "assistant", "content": "rewritten"}, user("+3=")],
        ]
    )
    trajectory, sampler = await play(plain, environment, ["one</think>2", "4", "5", "6"])
    check(trajectory, sampler)
    assert (trajectory.status, trajectory.outcome) == ("complete", {"reward": 1.0})
    assert [each.parent for each in trajectory.segments] == [-1, -1, 0]
    assert trajectory.message_segments == (0, 0, 1, 1, 0, 0, 2, 2, 2)
    assert sampler.calls[2][0][: len("1+1=") + len("one</think>2") + 1] == [
        *sampler.calls[0][0],
        *sampler.calls[0][1],
    ]


class Documented(Addition):
    def __init__(self, make: Callable[[], Episode]) -> None:
        self.make = make

    def episode(self, example: Example, seed: int) -> Episode:
        return self.make()


async def test_the_episodes_of_the_documentation_play(plain: ChatTokenizer) -> None:
    blocks = [each.split("```")[0] for each in PAGE.read_text().split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec("\n".join(each for each in blocks if "Conversation(" in each), names)
    task = Message("user", "sum up: ")
    compacting = Documented(lambda: names["NotesEpisode"](task, ["page 1", "page 2", "page 3"]))
    trajectory, sampler = await play(plain, compacting, ["one", "two", "three"])
    check(trajectory, sampler)
    assert (trajectory.outcome, len(trajectory.segments)) == ({"pages": 3}, 3)
    said = list_conversations(trajectory.segments, trajectory.messages, trajectory.message_segments)
    assert [each.content for each in said[2]] == ["sum up: ", "Your notes: two", "page 3", "three"]
    helped = Documented(lambda: names["HelperEpisode"]("how many?", "1+1="))
    trajectory, sampler = await play(plain, helped, ["help", "2", "done"])
    check(trajectory, sampler)
    assert trajectory.message_segments == (0, 0, 1, 1, 0, 0)
    assert trajectory.messages[4].content == "The helper says: 2"


def test_the_example_of_the_module_is_two_sequences() -> None:
    segments = (Segment(0, -1, 0, 0), Segment(4, 0, 1, 0))
    assert [each.tolist() for each in index_sequences(segments, 7)] == [[0, 1, 2, 3], [0, 4, 5, 6]]
    assert index_predecessors(segments, 7).tolist() == [-1, 0, 1, 2, 0, 4, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        [(1, -1, 0, 0)],
        [(0, -1, 0, 0), (4, 1, 1, 0)],
        [(0, -1, 0, 0), (8, 0, 1, 0)],
        [(0, -1, 0, 0), (4, -1, 1, 0)],
        [(0, -1, 0, 0), (4, 0, 5, 0)],
        [(0, -1, 0, 0), (4, 0, 1, 0), (3, 0, 1, 0)],
    ],
)
def test_segments_that_cannot_be_are_seen(wrong: list[tuple[int, ...]]) -> None:
    assert find_fault(tuple(Segment(*each) for each in wrong), 7)
    assert not find_fault((Segment(0, -1, 0, 0), Segment(4, 0, 4, 0), Segment(6, 1, 6, 2)), 7)
