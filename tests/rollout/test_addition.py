"""The addition environment."""

import numpy as np
import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environments.addition import Addition, noisy_student
from rollmill.tasks.rollout.trajectory_requests import check_prompts, example_index, sampling_seed


async def test_every_problem_is_in_exactly_one_split() -> None:
    environment = Addition()
    ids = [
        (await environment.example(split, i)).example_id
        for split in ("train", "held_out")
        for i in range(environment.size(split))
    ]
    assert len(ids) == len(set(ids)) == 90 * 90


async def test_at_least_512_problems_are_held_out_and_the_corpus_has_none_of_them() -> None:
    environment = Addition()
    held_out = {
        (await environment.example("held_out", i)).content["problem"]
        for i in range(environment.size("held_out"))
    }
    corpus = {opening.content for opening, _ in environment.warm_up_corpus(0, 2000)}
    assert len(held_out) >= 512
    assert not corpus & held_out


async def test_the_environment_asks_once_and_is_silent_after_the_answer() -> None:
    environment = Addition()
    example = await environment.example("train", 0)
    episode = environment.episode(example, seed=0)
    opening = await episode.reply(())
    assert [message.content for message in opening] == [example.content["problem"]]
    assert not await episode.reply(opening)


def test_most_students_guess_one_too_low_and_those_who_show_their_work_are_mostly_right() -> None:
    random = np.random.default_rng(0)
    answers = [noisy_student(47, 38, random) for _ in range(4000)]
    with_work = [answer for answer in answers if answer.startswith("[")]
    guesses = [answer for answer in answers if not answer.startswith("[")]
    assert 0.43 < len(with_work) / len(answers) < 0.51
    assert set(guesses) == {"84", "85"}
    assert 0.93 < guesses.count("84") / len(guesses) < 0.97
    assert 0.60 < np.mean([answer.endswith("]85") for answer in with_work]) < 0.68


def test_each_problem_is_drawn_once_an_epoch_and_in_another_order_in_the_next() -> None:
    first = [example_index(3, group, 50) for group in range(50)]
    second = [example_index(3, group, 50) for group in range(50, 100)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_sampling_seeds_differ_by_seed_group_and_sample_and_fit_the_sampler() -> None:
    seeds = {sampling_seed(a, b, c) for a in range(3) for b in range(20) for c in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_too_few_prompts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.groups_per_step"):
        check_prompts(Addition(), RolloutConfig(groups_per_step=100_000), 1)
    with pytest.raises(ConfigError, match=r"evaluate\.n_prompts"):
        check_prompts(Addition(), RolloutConfig(groups_per_step=1), 100_000)
    with pytest.raises(ConfigError, match=r"rollout\.max_refill_groups = 1: .* at most 0 refills"):
        check_prompts(
            Addition(), RolloutConfig(groups_per_step=Addition().size("train"), max_refill_groups=1), 1
        )
