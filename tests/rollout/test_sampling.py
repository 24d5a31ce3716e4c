"""Playing episodes against a sampler, and groups of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.tasks.errors import RequestError, ServiceDiedError
from rollmill.tasks.rollout.admission import Admission
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Episode, Example, Message, Split
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.task import RolloutChunk, StepSampler
from rollmill.tasks.rollout.trajectory import TrajectoryBuilder, TrajectoryRequest
from rollmill.tasks.rollout.trajectory_requests import group_deadline, plan_group_requests, split_chunks
from rollmill.tasks.store.rows import Rows
from rollmill.tasks.store.run.step_plan import Attempt


class Echo:
    """An environment of two turns: asks for a number, asks again, then is silent."""

    name = "echo"
    tools = ()
    stop = ()

    def size(self, split: Split) -> int:
        return 10

    async def example(self, split: Split, index: int) -> Example:
        return Example(str(index), {"problem": f"{index}?"})

    def episode(self, example: Example, seed: int) -> Episode:
        return EchoEpisode(str(example.content["problem"]))


class EchoEpisode:
    def __init__(self, problem: str) -> None:
        self.problem = problem

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if len(messages) > 2:
            return ()
        return (Message("user", "again?" if messages else self.problem),)

    async def close(self) -> dict[str, object]:
        return {"asked": 2}


class Scripted:
    """A sampler that answers `7<eos>`, or does what the sample's number says in its script."""

    def __init__(self, script: dict[int, Exception | str]) -> None:
        self.script = script
        self.in_flight = self.most_in_flight = 0

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        act = self.script.get(work.sample, "stop")
        if act == "abort":
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        else:
            await asyncio.sleep(3600 if act == "hang" else 0.01)
        self.in_flight -= 1
        if isinstance(act, Exception):
            raise act
        ids = np.array([9, 1] if act == "stop" else [9, 9], np.int32)
        return SampledTokens(ids, np.array([-0.5, -0.25], np.float32), [(0, 3), (1, 4)], act, "http://server")


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(save_character_tokenizer(tmp_path))


@asynccontextmanager
async def part_of(
    tokenizer: ChatTokenizer,
    sampler: Scripted,
    kept: list[Rows],
    *,
    in_flight: int = 8,
    group_timeout_s: float = 60.0,
    trajectory_timeout_s: float = 60.0,
    cut_grace_s: float = 60.0,
) -> AsyncIterator[RolloutChunk]:
    def keep(rows: Rows) -> Awaitable[None]:
        kept.append(rows)
        return asyncio.sleep(0)

    player = EpisodePlayer(
        Echo(), tokenizer, sampler, max_tokens=64, timeout_s=trajectory_timeout_s, cut_grace_s=cut_grace_s
    )
    admission = Admission(in_flight)
    step_sampler = StepSampler(player, admission, "run", 2, keep)
    work = await plan_group_requests(
        Echo(),
        run="run",
        seed=0,
        group=5,
        attempts=[Attempt(5, sample, 0) for sample in range(4)],
        temperature=1.0,
        timeout_s=5.0,
    )
    with admission.request_slots(len(work), (2, 0)) as tickets:
        yield RolloutChunk(step_sampler, work, tickets, group_deadline(group_timeout_s))


async def finish(
    tokenizer: ChatTokenizer, sampler: Scripted, kept: list[Rows] | None = None, **settings: Any
) -> list[dict[str, object]]:
    async with part_of(tokenizer, sampler, [] if kept is None else kept, **settings) as part:
        sampled = await part.sample()
        await asyncio.gather(*sampled.acknowledgements)
    rows: list[dict[str, object]] = sampled.rows.to_pylist()
    return rows


class Routed(Scripted):
    """Returns routed experts as vLLM does: of all tokens from the number on that was asked for, but the last."""

    asked: list[tuple[int | None, int]]

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        sampled = await super().sample(work, token_ids, until)
        self.asked.append((routing_from, len(token_ids)))
        places = np.arange(routing_from or 0, len(token_ids) + len(sampled.token_ids) - 1, dtype=np.uint8)
        return replace(sampled, routed_experts=np.repeat(places, 6).reshape(-1, 3, 2))


async def test_every_token_of_an_episode_is_routed_once_whatever_its_turns(tokenizer: ChatTokenizer) -> None:
    sampler = Routed({})
    sampler.asked = []
    player = EpisodePlayer(Echo(), tokenizer, sampler, max_tokens=64, timeout_s=5.0)
    work = TrajectoryRequest("run.5.0.0", 5, 0, 0, await Echo().example("train", 0), 0, 1.0)
    trajectory = await player.play(work, keeps_routing=True)
    (_, first), (asked, _) = sampler.asked
    assert asked == first + 1  # of two sampled tokens the last is routed in the next turn
    rows = np.concatenate(trajectory.routed_experts)
    assert rows[:, 0, 0].tolist() == list(range(len(trajectory.token_ids) - 1))


@given(turns=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6))
def test_stitched_turns_are_the_rows_of_the_whole_sequence(turns: list[tuple[int, int]]) -> None:
    draft = TrajectoryBuilder(
        TrajectoryRequest("run.5.0.0", 5, 0, 0, Example("0", {}), 0, 1.0), keeps_routing=True
    )
    for n_context, n_sampled in turns:
        draft.add_context(np.zeros(n_context, np.int32))
        end = draft.n_tokens + n_sampled - 1
        draft.add_routing(np.arange(draft.segment.n_routed, end).reshape(-1, 1, 1))
        draft.add_completion(np.zeros(n_sampled, np.int32), np.zeros(n_sampled), [(0, 0)], "stop")
    assert np.concatenate(draft.build("complete").routed_experts).ravel().tolist() == list(
        range(draft.n_tokens - 1)
    )


async def test_an_episode_of_two_turns_masks_exactly_the_sampled_tokens(tokenizer: ChatTokenizer) -> None:
    row = (await finish(tokenizer, Scripted({})))[0]
    assert (row["status"], row["turns"]) == ("complete", 2)
    assert np.array(row["loss_mask"]).sum() == row["n_completion_tokens"] == 4
    assert tokenizer.decode(np.array(row["token_ids"])[np.array(row["loss_mask"])]) == "77"
    assert np.isnan(np.array(row["logprobs"])[~np.array(row["loss_mask"])]).all()
    assert np.array(row["logprobs"])[np.array(row["loss_mask"])].tolist() == [-0.5, -0.25, -0.5, -0.25]


async def test_version_spans_index_the_whole_sequence(tokenizer: ChatTokenizer) -> None:
    row = (await finish(tokenizer, Scripted({})))[0]
    prompt = row["n_prompt_tokens"]
    assert row["version_span_starts"] == [prompt, prompt + 1, prompt + 8, prompt + 9]
    assert row["version_span_versions"] == [3, 4, 3, 4]
    assert (row["policy_version_first"], row["policy_version_last"]) == (3, 4)


async def test_a_failed_request_is_a_failed_row_and_its_group_continues(tokenizer: ChatTokenizer) -> None:
    kept: list[Rows] = []
    rows = await finish(tokenizer, Scripted({1: RequestError("status 400: no")}), kept)
    assert [row["status"] for row in rows] == ["complete", "failed", "complete", "complete"]
    assert (rows[1]["error_type"], rows[1]["error"]) == ("RequestError", "status 400: no")
    assert rows[1]["policy_version_first"] == -1
    assert sum(each.num_rows for each in kept) == 4


async def test_an_answer_cut_off_at_the_length_limit_is_truncated(tokenizer: ChatTokenizer) -> None:
    rows = await finish(tokenizer, Scripted({0: "length"}))
    assert (rows[0]["status"], rows[0]["finish_reason"]) == ("truncated", "length")


async def test_a_service_that_is_gone_for_good_ends_the_group_instead_of_failing_rows(
    tokenizer: ChatTokenizer,
) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await finish(tokenizer, Scripted({2: ServiceDiedError("vllm", "gone")}))
    assert isinstance(raised.value.exceptions[0], ServiceDiedError)


async def test_admission_bounds_the_trajectories_in_flight(tokenizer: ChatTokenizer) -> None:
    sampler = Scripted({})
    await finish(tokenizer, sampler, in_flight=2)
    assert sampler.most_in_flight == 2


async def test_the_same_arguments_give_the_same_work_and_ids_are_unique() -> None:
    async def ids(group: int) -> list[str]:
        work = await plan_group_requests(
            Echo(),
            run="ab",
            seed=1,
            group=group,
            attempts=[Attempt(group, sample, 0) for sample in range(3)],
            temperature=1.0,
            timeout_s=5.0,
        )
        return [item.trajectory_id for item in work]

    assert await ids(7) == await ids(7) == ["ab.7.0.0", "ab.7.1.0", "ab.7.2.0"]
    assert not set(await ids(7)) & set(await ids(8))


async def test_a_trajectory_at_its_deadline_is_cancelled_and_keeps_its_tokens(
    tokenizer: ChatTokenizer,
) -> None:
    rows = await finish(tokenizer, Scripted({1: "abort"}), trajectory_timeout_s=1.0)
    assert [row["status"] for row in rows] == ["complete", "cancelled", "complete", "complete"]
    assert rows[1]["n_completion_tokens"] == 2
    assert rows[1]["error_type"] == "Deadline"
    assert "rollout.trajectory_timeout_s = 1 s" in str(rows[1]["error"])


async def test_a_sampler_that_does_not_answer_at_its_deadline_is_cancelled_too(
    tokenizer: ChatTokenizer,
) -> None:
    rows = await finish(tokenizer, Scripted({0: "hang"}), trajectory_timeout_s=1.0, cut_grace_s=0.1)
    assert [row["status"] for row in rows] == ["cancelled", "complete", "complete", "complete"]
    assert int(str(rows[0]["n_prompt_tokens"])) > 0


async def test_a_group_deadline_cancels_those_that_wait_for_a_slot_too(tokenizer: ChatTokenizer) -> None:
    rows = await finish(tokenizer, Scripted({0: "hang"}), in_flight=1, group_timeout_s=0.1, cut_grace_s=0.1)
    assert [row["status"] for row in rows] == ["cancelled"] * 4
    assert "cut before it began: the group's limit of 0.1 s" in str(rows[3]["error"])


async def test_a_request_that_the_server_aborts_is_a_failed_row_with_its_tokens(
    tokenizer: ChatTokenizer,
) -> None:
    class Aborting(Scripted):
        async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
            ids = np.array([9], np.int32)
            return SampledTokens(ids, np.array([-0.5], np.float32), [(0, 3)], "abort", "http://server")

    row, *_ = await finish(tokenizer, Aborting({}))
    assert (row["status"], row["error_type"], row["n_completion_tokens"]) == ("failed", "EpisodeError", 1)


async def test_the_outcome_of_the_environment_is_in_the_row(tokenizer: ChatTokenizer) -> None:
    row, *_ = await finish(tokenizer, Scripted({}))
    assert row["outcome"] == '{"asked": 2}'


async def test_an_episode_gets_the_message_that_a_limit_cut_before_it_is_closed(
    tokenizer: ChatTokenizer,
) -> None:
    class Noting(EchoEpisode):
        def take_cut(self, message: Message) -> None:
            seen.append(message.content)

        async def close(self) -> dict[str, object]:
            seen.append("closed")
            return {}

    seen: list[str] = []

    class Cutting(Echo):
        def episode(self, example: Example, seed: int) -> Episode:
            return Noting("1?")

    player = EpisodePlayer(Cutting(), tokenizer, Scripted({0: "length"}), max_tokens=64, timeout_s=60.0)
    example = await Cutting().example("train", 0)
    trajectory = await player.play(TrajectoryRequest("r.0.0.0", 0, 0, 0, example, 1, 1.0))
    assert trajectory.status == "truncated"
    assert seen == [trajectory.messages[-1].content, "closed"]


def test_chunks_hold_all_of_a_group_in_order() -> None:
    assert [list(part) for part in split_chunks(range(5), 2)] == [[0, 1], [2, 3], [4]]
    assert [list(part) for part in split_chunks(range(5), 0)] == [[0, 1, 2, 3, 4]]
    assert split_chunks([], 2) == []
