"""The calculator and the guessing game, and their corpora as the player joins their turns."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.rollout.chat_tokenizer import (
    ChatTokenizer,
    save_character_tokenizer,
    tokenize_conversation,
)
from rollmill.tasks.rollout.environment import Environment, Example, Message, Split, WarmUp
from rollmill.tasks.rollout.environments.calculator import Calculator, calculate
from rollmill.tasks.rollout.environments.guess import Guess
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest

GAMES = [Calculator(), Guess()]


class Saying:
    """A sampler that says prepared turns, as token ids."""

    def __init__(self, turns: Sequence[np.ndarray]) -> None:
        self.turns = list(turns)

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        ids = self.turns.pop(0)
        return SampledTokens(ids, np.zeros(len(ids), np.float32), [(0, 0)], "stop", "http://server")


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(save_character_tokenizer(tmp_path))


async def examples_of(environment: Environment, split: Split) -> list[Example]:
    return [await environment.example(split, number) for number in range(environment.size(split))]


async def play(
    tokenizer: ChatTokenizer,
    environment: Environment,
    example: Example,
    turns: Sequence[str],
    max_tokens: int = 256,
) -> Trajectory:
    """An episode in which the policy says `turns`, as far as it is asked."""
    sampler = Saying([tokenizer.encode_answer(turn, environment.stop) for turn in turns])
    player = EpisodePlayer(environment, tokenizer, sampler, max_tokens=max_tokens, timeout_s=5.0)
    return await player.play(TrajectoryRequest("t", 0, 0, 0, example, 0, 1.0))


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
async def test_a_corpus_has_the_tokens_and_the_mask_that_playing_the_same_words_gives(
    game: Calculator | Guess, tokenizer: ChatTokenizer
) -> None:
    examples = await examples_of(game, "train")
    for conversation in game.warm_up_corpus(0, 8):
        said = [message.content for message in conversation if message.role == "assistant"]
        possible = [each for each in examples if each.content["problem"] == conversation[0].content]
        trajectories = [await play(tokenizer, game, each, said) for each in possible]
        same = next(each for each in trajectories if each.messages == tuple(conversation))
        ids, mask = tokenize_conversation(tokenizer, conversation, game.tools, game.stop)
        assert same.token_ids.tolist() == ids.tolist()
        assert same.loss_mask.tolist() == mask.tolist()


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)
async def test_no_problem_is_in_both_splits_and_the_corpus_has_training_problems_alone(
    game: Calculator | Guess,
) -> None:
    assert isinstance(game, WarmUp)
    examples = await examples_of(game, "train")
    train = {each.example_id for each in examples}
    held_out = {each.example_id for each in await examples_of(game, "held_out")}
    assert not train & held_out
    assert 0.15 < len(held_out) / (len(train) + len(held_out)) < 0.25
    assert len(held_out) >= 512
    openings = {each.content["problem"] for each in examples}
    assert {conversation[0].content for conversation in game.warm_up_corpus(0, 500)} <= openings


async def test_no_range_of_guess_is_in_both_splits() -> None:
    train = {each.content["problem"] for each in await examples_of(Guess(), "train")}
    held_out = {each.content["problem"] for each in await examples_of(Guess(), "held_out")}
    assert len(held_out) > 50
    assert not train & held_out


async def test_the_calculator_prints_and_then_takes_the_answer(tokenizer: ChatTokenizer) -> None:
    example = await Calculator().example("train", 0)
    trajectory = await play(tokenizer, Calculator(), example, ["<17*55>", "935"])
    assert [message.content for message in trajectory.messages[1:]] == ["<17*55>", "935|", "935"]
    assert (trajectory.status, len(trajectory.turns)) == ("complete", 2)
    assert trajectory.outcome == {"calls": ["<17*55>"]}
    assert tokenizer.decode(trajectory.token_ids[trajectory.loss_mask]) == "<17*55>935"


async def test_a_message_of_the_environment_is_left_out_where_no_token_could_follow_it(
    tokenizer: ChatTokenizer,
) -> None:
    example = await Calculator().example("train", 0)
    n_tokens = len(str(example.content["problem"]) + "<17*55>")
    room_for_two = n_tokens + len("93")
    trajectory = await play(tokenizer, Calculator(), example, ["<17*55>"], max_tokens=room_for_two)
    assert (trajectory.status, len(trajectory.token_ids)) == ("truncated", n_tokens)
    assert trajectory.messages[-1].content == "935|"
    assert trajectory.loss_mask[-1]


async def test_an_opening_that_leaves_no_room_is_a_failed_row_with_that_error(
    tokenizer: ChatTokenizer,
) -> None:
    trajectory = await play(tokenizer, Calculator(), await Calculator().example("train", 0), [], max_tokens=9)
    assert (trajectory.status, trajectory.error_type) == ("failed", "LongPromptError")
    assert "serve.max_model_len" in trajectory.error


@pytest.mark.parametrize(
    ("call", "printed"), [("<17*55>", "935|"), ("<5-17>", "-12|"), ("<17*>", "?|"), ("<1+1+1>", "?|")]
)
def test_the_calculator_computes_with_two_numbers_and_reports_when_it_cannot(call: str, printed: str) -> None:
    assert calculate(call) == printed


@pytest.mark.parametrize(
    ("guesses", "hints", "won"),
    [
        (lambda n: [f"{n}?"], [], True),
        (lambda n: [f"{n - 1}?", f"{n + 1}?", f"{n}?"], ["higher:", "lower:"], True),
        (lambda n: [f"{n + 1}?"] * 5, ["lower:"] * 4, False),
        (lambda n: ["higher"], [], False),
    ],
    ids=["at once", "third", "never", "no guess"],
)
async def test_the_guessing_game_ends_when_won_after_five_guesses_or_at_other_words(
    guesses: object, hints: list[str], won: bool, tokenizer: ChatTokenizer
) -> None:
    example = await Guess().example("train", 0)
    assert callable(guesses)
    said = guesses(int(str(example.content["answer"])))
    episode = Guess().episode(example, 0)
    messages = tuple(await episode.reply(()))
    heard = []
    for turn in said:
        messages += (Message("assistant", turn),)
        reply = tuple(await episode.reply(messages))
        messages += reply
        heard += [message.content for message in reply]
    assert heard == hints
    assert not reply
    assert await episode.close() == {"guesses": len(said), "won": won}
