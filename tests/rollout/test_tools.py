"""Tools, and the environment of docs/how-to/environments.md."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.errors import ToolError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Message, make_environment
from rollmill.tasks.rollout.environments.endpoint.chat_wire import assistant_message
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.tools import ToolCall, run_tool, tool_calls
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest
from rollmill.tasks.score.scorers.code_scorer import find_program

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "environments.md"
CALL = '<tool_call>\n{"name": "price", "arguments": {"fruit": "FRUIT"}}\n</tool_call>'


def test_calls_are_read_in_order_and_what_is_none_is_left_out() -> None:
    said = "let me see <tool_call>{oops}</tool_call>" + CALL + CALL.replace("FRUIT", "fig")
    assert tool_calls(said) == [ToolCall("price", {"fruit": "FRUIT"}), ToolCall("price", {"fruit": "fig"})]
    assert tool_calls('<tool_call>{"name": 3}</tool_call> <tool_call>{"name"') == []


async def test_a_tool_may_be_slow_and_answers_as_text_or_json() -> None:
    async def slow(n: int) -> list[int]:
        return [n]

    assert await run_tool(slow, ToolCall("slow", {"n": 4})) == "[4]"
    assert await run_tool(str.upper, ToolCall("upper", {})) == "error: missing a required argument: 'self'"


async def test_a_tool_that_raises_is_named() -> None:
    def broken() -> None:
        raise OSError("no disk")

    with pytest.raises(ToolError, match="tool broken raised OSError: no disk"):
        await run_tool(broken, ToolCall("broken", {}))


class Wordy:
    """A tokenizer is not what these tests are about: this sampler's turns are decoded to prepared words."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = list(turns)

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        ids = np.array([len(self.turns), 1], np.int32)
        return SampledTokens(ids, np.zeros(2, np.float32), [(0, 0)], "stop", "http://server")


class WordyTokenizer(ChatTokenizer):
    """Decodes a completion to the next prepared turn."""

    sampler: Wordy

    def decode(self, token_ids: np.ndarray) -> str:
        return self.sampler.turns.pop(0)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutConfig:
    """The page's example, saved as a module."""
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "shop.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return RolloutConfig(environment="shop:Shop")


async def play(config: RolloutConfig, folder: Path, turns: Sequence[str]) -> Trajectory:
    environment = make_environment(config)
    tokenizer = WordyTokenizer.load(save_character_tokenizer(folder))
    sampler = Wordy(turns)
    tokenizer.sampler = sampler
    player = EpisodePlayer(environment, tokenizer, sampler, max_tokens=4096, timeout_s=5.0)
    return await player.play(TrajectoryRequest("t", 0, 0, 0, await environment.example("train", 0), 0, 1.0))


async def test_the_environment_of_the_documentation_plays(shop: RolloutConfig, tmp_path: Path) -> None:
    trajectory = await play(shop, tmp_path, [CALL.replace("FRUIT", "fig"), "2"])
    assert trajectory.error == ""
    assert trajectory.messages[2] == Message("tool", "2", name="price")
    assert (trajectory.status, trajectory.outcome) == ("complete", {"n_calls": 1})


async def test_a_tool_that_raises_is_a_failed_row_with_its_error_type(
    shop: RolloutConfig, tmp_path: Path
) -> None:
    trajectory = await play(shop, tmp_path, [CALL, "2"])
    assert (trajectory.status, trajectory.error_type) == ("failed", "ToolError")
    assert trajectory.error == "tool price raised KeyError: 'FRUIT'"
    assert len(trajectory.turns) == 1


def test_many_calls_that_are_not_closed_are_read_in_linear_time() -> None:
    """A regular expression took minutes of CPU for these."""
    said = "<tool_call>\n" * 200_000
    assert tool_calls(said) == []
    assert assistant_message(said, 0)["content"] == said
    assert find_program("```python\n" * 200_000) is None
    assert tool_calls(f"<tool_call>{'[' * 100_000}</tool_call>") == []
