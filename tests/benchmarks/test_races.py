"""Everybody in `time_to_reward` has the same work, and the made-up model's answers are as uneven as they are said to be."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import time_to_reward
from benchmarks.races.case import write_case
from benchmarks.races.crc import reward
from benchmarks.races.words import END_AFTER_TOKENS, EOS_ID, Words, save_model
from benchmarks.suite.process import ROOT
from benchmarks.time_to_reward import SCORER, TINY_SCORER, tiny
from benchmarks.trainer.lengths import N_PROMPT_TOKENS
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environments.addition import Addition
from rollmill.tasks.rollout.trajectory_requests import example_index
from rollmill.tasks.score.score_function import load_object
from rollmill.tasks.score.scorer import Candidate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_prompt_of_words_is_64_tokens_for_us_and_for_a_peer(model: Path) -> None:
    problem = str(asyncio.run(Words().example("train", 3)).content["problem"])
    ours = ChatTokenizer.load(model)._ids(problem)
    assert len(ours) == N_PROMPT_TOKENS
    assert AutoTokenizer.from_pretrained(model)(problem)["input_ids"] == ours.tolist()


@torch.no_grad()
def test_answers_of_the_made_up_model_end_as_often_as_said(model: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    logits = policy(input_ids=torch.randint(2, policy.config.vocab_size, (4, 300))).logits
    ends = torch.softmax(logits, -1)[..., EOS_ID]
    assert float(ends.mean()) * END_AFTER_TOKENS == pytest.approx(1.0, rel=0.15)
    assert float(ends.std() / ends.mean()) < 0.5


def test_rewards_of_a_group_differ() -> None:
    said = [[{"role": "assistant", "content": f"word{number}"}] for number in range(8)]
    rewards = {reward(Candidate("", {}, messages, is_complete=True)) for messages in said}
    assert len(rewards) == 8
    assert all(0.0 <= each < 1.0 for each in rewards)


def test_a_peer_has_the_problems_of_the_runs_groups_in_their_order(tmp_path: Path) -> None:
    config = tiny(tmp_path, steps=2)
    case = json.loads(
        write_case(tmp_path / "case.json", config, Addition(), TINY_SCORER, {"threads": 1}).read_text()
    )
    n_groups = 2 * config.rollout.groups_per_step
    problems = [each["example"]["problem"] for each in case["problems"]]
    expected = [
        asyncio.run(Addition().example("train", example_index(config.seed, group, Addition().size("train"))))
        for group in range(n_groups)
    ]
    assert problems == [each.content["problem"] for each in expected]
    assert len(case["held_out"]) == config.evaluate.n_prompts
    assert case["lr"] == config.train.lr


def test_what_trl_prints_is_read_as_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (ROOT / "benchmarks" / "peers" / "trl_learns.py").read_text()
    keys = re.findall(r'"(\w+)": ', script[script.rindex("json.dumps(") :])
    printed = {key: [0.25, 0.75] for key in keys}
    monkeypatch.setattr(time_to_reward, "environment_of", lambda peer: Path(peer))
    monkeypatch.setattr(time_to_reward, "run", lambda words: f"a log line\n{json.dumps(printed)}\n")
    race = time_to_reward.trl(tmp_path, tiny(tmp_path, steps=2), Addition(), TINY_SCORER, {})
    assert race.held_out == [0.25, 0.75]
    assert race.median_s(0) == 0.5


@pytest.mark.parametrize("path", [SCORER, TINY_SCORER])
def test_scorers_are_found_where_a_peer_imports_them(path: str) -> None:
    found = load_object(path)
    assert callable(found.score if isinstance(found, type) else found)
