"""Rollmill's own steps over two visits of the same problems: the first is the history, the second is measured."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from prefect import flow
from prefect.utilities.annotations import quote

from benchmarks.schedules.latencies import GROUP_SIZE, N_GROUPS
from benchmarks.schedules.visits import Seconds, draw, schedule
from rollmill.flows.run.live_run import open_run
from rollmill.flows.step.step_collection import collect_step
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, save_character_tokenizer
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn, Split
from rollmill.tasks.rollout.episode import SampledTokens
from rollmill.tasks.rollout.trajectory import TrajectoryRequest
from tests.stubs.toy_settings import validate_toy

MEDIAN_TOKENS = 20
MEDIAN_S = 0.5
TIMEOUT_S = 3600.0


class Problems:
    """As many problems as groups; each is its number."""

    name = "problems"
    tools: tuple[Mapping[str, object], ...] = ()
    stop: tuple[str, ...] = ()

    def size(self, split: Split) -> int:
        """Return the number of problems; see Environment."""
        return N_GROUPS

    async def example(self, split: Split, index: int) -> Example:
        """Return a problem; see Environment."""
        return Example(str(index), {})

    def episode(self, example: Example, seed: int) -> SingleTurn:
        """Return an episode of one turn; see Environment."""
        return SingleTurn((Message("user", example.example_id),))


@dataclass(frozen=True, slots=True)
class Sleeping:
    """Answers with as many tokens as the drawn length says, in the measured step after as many seconds."""

    lengths: Sequence[Seconds]
    tokenizer: ChatTokenizer
    order: list[int]

    async def sample(
        self, work: TrajectoryRequest, token_ids: np.ndarray, until: float, routing_from: int | None = None
    ) -> SampledTokens:
        """Return the answer; see Sampler."""
        step, problem = work.group // N_GROUPS, int(work.example.example_id)
        length = self.lengths[step][problem][work.sample]
        if step:
            if problem not in self.order:
                self.order.append(problem)
            await asyncio.sleep(MEDIAN_S * length)
        answer = self.tokenizer.encode_answer("1" * _count_tokens(length))
        return SampledTokens(answer, np.zeros(len(answer), np.float32), ((0, 0),), "stop", "asleep")


async def score(candidate: object) -> float:
    """Return a reward at once."""
    return 1.0


@flow(flow_run_name="seed {seed}, {n_slots} slots, longest first: {longest_first}", persist_result=False)
async def order(folder: Path, seed: int, n_slots: int, longest_first: bool) -> float:
    """Collect two steps; return the seconds of the second one over those of its order without any overhead.

    Raises:
        RuntimeError: with `longest_first` the groups of the second step began in another order.
    """
    config = validate_toy(
        {
            "model": str(save_character_tokenizer(folder / "model")),
            "steps": 2,
            "rollout": {
                "groups_per_step": N_GROUPS,
                "group_size": GROUP_SIZE,
                "max_in_flight": n_slots,
                "longest_first": longest_first,
                "trajectory_timeout_s": TIMEOUT_S,
            },
            "score": {"scorer": f"{score.__module__}:{score.__name__}"},
            "store": {"root": str(folder / "runs")},
        }
    )
    lengths, begun = draw(seed), list[int]()
    async with open_run(f"{seed}-{n_slots}-{longest_first}", config, Path(config.model)) as run:
        (environment,) = run.environments
        sampler = Sleeping(lengths, environment.player.tokenizer, begun)
        player = replace(environment.player, environment=Problems(), sampler=sampler)
        planted = replace(run, environments=(replace(environment, environment=Problems(), player=player),))
        collected = []
        for step in range(2):
            run.recording.count_start()
            collected.append(await collect_step(quote(planted), step, wait_for=()))
        await run.recording.wait_until_recorded()
    stored = [sum(map(_count_tokens, lengths[0][problem])) for problem in begun]
    if longest_first and stored != sorted(stored, reverse=True):
        raise RuntimeError(f"the groups did not begin with the longest of the step before: {stored} tokens")
    return collected[1].seconds / (MEDIAN_S * schedule(lengths[1], begun, n_slots))


def _count_tokens(length: float) -> int:
    """Return the tokens of an answer of this length."""
    return max(1, round(MEDIAN_TOKENS * length))
