"""Prompts longer than rollout.max_prompt_tokens: they fail, are dropped, or keep their end, and are counted."""

import logging
from pathlib import Path

import numpy as np
import pytest

from rollmill.flows.step.lost_trajectories import FailureWatch
from rollmill.tasks.errors import ConfigError, FailedShareError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.prompt_limit import PromptLimit
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest, rollout_rows
from tests.stubs.toy_settings import validate_toy

PROBLEM = "123456789?"
"""Ten tokens, of one character each."""


class Asking:
    """An environment that asks its one problem."""

    name, tools, stop = "asking", (), ()

    def size(self, split: str) -> int:
        return 1

    async def example(self, split: str, index: int) -> Example:
        return Example("0", {"problem": PROBLEM})

    def episode(self, example: Example, seed: int) -> SingleTurn:
        return SingleTurn((Message("user", str(example.content["problem"])),))


class Answering:
    """A sampler that answers `7<eos>`."""

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        ids = np.array([9, 1], np.int32)
        return SampledTokens(ids, np.array([-0.5, -0.25], np.float32), [(0, 3)], "stop", "http://server")


async def play(tmp_path: Path, limit: PromptLimit) -> Trajectory:
    tokenizer = ChatTokenizer.load(save_character_tokenizer(tmp_path / "model"))
    player = EpisodePlayer(Asking(), tokenizer, Answering(), max_tokens=64, timeout_s=5.0, prompt_limit=limit)
    example = await Asking().example("train", 0)
    return await player.play(TrajectoryRequest("ab.7.0.0", 7, 0, 0, example, 3, 1.0))


async def test_a_prompt_of_the_limit_is_sampled_and_a_longer_one_is_a_failed_row_with_both_lengths(
    tmp_path: Path,
) -> None:
    allowed = await play(tmp_path, PromptLimit.from_config(RolloutConfig(max_prompt_tokens=10), 64))
    assert allowed.status == "complete"
    failed = await play(tmp_path, PromptLimit.from_config(RolloutConfig(max_prompt_tokens=9), 64))
    assert (failed.status, failed.error_type) == ("failed", "LongPromptError")
    assert failed.error == "the opening has 10 tokens, and may have 9 (rollout.max_prompt_tokens = 9)"
    assert len(failed.token_ids) == 0


async def test_without_a_limit_a_prompt_leaves_room_for_a_token_of_the_longest_sequence(
    tmp_path: Path,
) -> None:
    assert (await play(tmp_path, PromptLimit.from_config(RolloutConfig(), 11))).status == "complete"
    failed = await play(tmp_path, PromptLimit.from_config(RolloutConfig(), 10))
    assert failed.error == "the opening has 10 tokens, and may have 9 (serve.max_model_len = 10)"


async def test_the_end_of_a_long_prompt_is_kept_its_messages_stay_and_it_is_counted(tmp_path: Path) -> None:
    limit = PromptLimit.from_config(RolloutConfig(max_prompt_tokens=4, long_prompts="keep_end"), 64)
    whole = await play(tmp_path, PromptLimit.from_config(RolloutConfig(), 64))
    cut = await play(tmp_path, limit)
    assert cut.status == "complete"
    assert cut.token_ids.tolist() == whole.token_ids[6:].tolist()
    assert int(np.argmax(cut.loss_mask)) == 4
    assert cut.messages == whole.messages
    assert limit.n_cut == 1
    await play(
        tmp_path, PromptLimit.from_config(RolloutConfig(max_prompt_tokens=10, long_prompts="keep_end"), 64)
    )
    assert limit.n_cut == 1


async def test_a_dropped_prompt_is_logged_and_stored_and_does_not_count_for_the_failed_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = await play(tmp_path, PromptLimit.from_config(RolloutConfig(max_prompt_tokens=9), 64))
    rows = rollout_rows("ab", 0, "echo", [failed])
    with pytest.raises(FailedShareError, match="1 times LongPromptError"):
        FailureWatch(0, 2, 0.4, logging.getLogger).see(rows)
    watch = FailureWatch(0, 2, 0.4, logging.getLogger, uncounted=lambda group: {"LongPromptError"})
    caplog.clear()
    watch.see(rows)
    assert watch.n_failed == 0
    assert "LongPromptError: the opening has 10 tokens" in caplog.text


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"max_prompt_tokens": 256},
            r"rollout\.max_prompt_tokens = 256: must be below serve\.max_model_len, which is 256",
        ),
        ({"long_prompts": "keep_end"}, r"rollout\.long_prompts = 'keep_end': .*give their number"),
        ({"long_prompts": "cut"}, r"rollout\.long_prompts = 'cut': .*'fail', 'drop' or 'keep_end'"),
    ],
)
def test_limits_without_sense_are_refused(rollout: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_toy({"rollout": rollout})
