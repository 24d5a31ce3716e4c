"""A published environment of someone else, as it is: hangman of TextArena, in the verifiers library's own task set."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens, Sampler
from rollmill.tasks.rollout.remote_environment import RemoteEnvironment, open_environment
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import plan_group_requests
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.run.step_plan import Attempt

WORDS = ["stone", "house", "mouse", "plane", "tree"]
N_TASKS = 20
CONFIG = RolloutConfig(
    environment={
        "name": "verifiers:textarena",
        "args": {"taskset": {"game": "Hangman-v0"}, "select": {"limit": N_TASKS}},
    },
)
MAX_TOKENS = 4096
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def word_list(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The dictionary that the game draws its words from, in place of the one that it would download."""
    folder = tmp_path_factory.mktemp("nltk") / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(WORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(folder.parent.parent))
        for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.setenv(proxy, "http://127.0.0.1:9")  # nobody is there: nothing is downloaded
        yield


@pytest.fixture
def environment(tmp_path: Path) -> AbstractAsyncContextManager[RemoteEnvironment]:
    return open_environment(CONFIG, logs=tmp_path, stop_grace_s=5.0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    folder = save_character_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokenizer.load(folder)


class Guesses:
    """A sampler that guesses the letters of its words in order, at policy version 7."""

    def __init__(self, tokenizer: ChatTokenizer, letters: str) -> None:
        self._tokenizer, self._letters = tokenizer, letters
        self._turns: dict[int, int] = {}
        self.prompts: list[np.ndarray] = []

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        turn = self._turns.get(work.sample, 0)
        self._turns[work.sample] = turn + 1
        self.prompts.append(token_ids)
        ids = self._tokenizer.encode_answer(f"i guess [{self._letters[turn]}]")
        return SampledTokens(ids, np.full(len(ids), -0.5, np.float32), [(0, 7)], "stop", "http://server")


async def play(
    environment: RemoteEnvironment, tokenizer: ChatTokenizer, sampler: Sampler, n: int
) -> list[Trajectory]:
    player = EpisodePlayer(environment, tokenizer, sampler, max_tokens=MAX_TOKENS, timeout_s=120.0)
    work = await plan_group_requests(
        environment,
        run="run",
        seed=0,
        group=0,
        attempts=[Attempt(0, sample, 0) for sample in range(n)],
        temperature=1.0,
        timeout_s=60.0,
    )
    return list(await asyncio.gather(*(player.play(each) for each in work)))


@pytest.mark.slow
async def test_a_published_game_is_won_by_who_knows_its_letters(
    environment: AbstractAsyncContextManager[RemoteEnvironment], tokenizer: ChatTokenizer
) -> None:
    sampler = Guesses(tokenizer, "eosnthulmapr")
    async with environment as game:
        assert game.size("train") + game.size("held_out") == N_TASKS
        won, same = await play(game, tokenizer, sampler, 2)
    assert (won.status, won.error) == ("complete", "")
    assert won.outcome["rewards"] == {"game_reward": won.outcome["reward"]}
    assert won.outcome["reward"] == 1.0
    assert len(won.turns) > 3
    assert [message.role for message in won.messages[:4]] == ["system", "user", "assistant", "user"]
    assert (won.token_ids == same.token_ids).all()
    assert tokenizer.decode(won.token_ids[won.loss_mask]).startswith("i guess [e]i guess [o]")
    longest = max(sampler.prompts, key=len)
    assert (won.token_ids[: len(longest)] == longest).all()


@pytest.fixture
def long_server(
    save_tiny: Callable[..., Path], run_server: Callable[..., AbstractContextManager[Any]]
) -> Iterator[Any]:
    """A server whose model has room for a game, and a chat template."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = save_tiny(
        Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, max_position_embeddings=MAX_TOKENS
    )
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with run_server(model, max_model_len=MAX_TOKENS) as served:
        yield served


@pytest.mark.service
async def test_a_published_game_is_played_by_a_served_policy_whose_version_is_known(
    environment: AbstractAsyncContextManager[RemoteEnvironment], long_server: Any
) -> None:
    tokenizer = ChatTokenizer.load(long_server.model)
    config = CONFIG.model_copy(
        update={"max_completion_tokens": 400}
    )  # a random policy takes long to come to an end
    async with VllmClient(long_server.url, long_server.config) as client, environment as game:
        await client.set_version("run:1:3")
        pool = ServerPool()
        pool.admit(client)
        trajectories = await play(game, tokenizer, PoolSampler(pool, config, "run", 120.0), 4)
        longest = max(trajectories, key=lambda each: (each.status == "complete", len(each.turns)))
        known = await client.prompt_logprobs(longest.token_ids)
    assert (longest.status, longest.error) == ("complete", "")
    assert len(longest.turns) > 1
    assert isinstance(longest.outcome["reward"], float)
    assert {version for _, version in longest.version_spans} == {3}
    sampled = longest.loss_mask
    np.testing.assert_allclose(longest.logprobs[sampled], known[sampled[1:]], atol=1e-3)
