"""The steps of an imported run: groups of logged conversations, stored as if they had been sampled."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.run.live_run import Run
from rollmill.tasks.errors import ConfigError, EpisodeError, StoreError
from rollmill.tasks.rollout.chat_logs.logged_conversation import (
    LoggedConversation,
    distinguish_digest,
    drop_duplicates,
)
from rollmill.tasks.rollout.chat_logs.logged_trajectory import (
    DIGEST,
    build_logged_trajectory,
    place_in_group,
)
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import make_environment, needs_worker
from rollmill.tasks.rollout.trajectory import Trajectory, rollout_rows
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.run.group_ranges import make_plan_rows

Group = tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class LogImport:
    """What is to be added to a run from log files.

    Attributes:
        groups: new conversations as trajectories, answers to the same prompt together.
        first_step: the first step that has no rollouts yet.
        groups_per_step: groups of each step but the last, which may have fewer.
        left_out: number of conversations that are not imported, by reason.
    """

    groups: Sequence[Group]
    first_step: int
    groups_per_step: int
    left_out: Counter[str]

    @classmethod
    def plan(
        cls, folder: RunFolder, config: RunConfig, model: Path, logged: Sequence[LoggedConversation]
    ) -> Self:
        """Find which logged conversations a run does not have yet, and form groups of them.

        Args:
            folder: of the run; it need not exist.
            config: all settings.
            model: folder of the model that is trained, whose tokenizer and chat template are used.
            logged: conversations, in the order in which they are stored.

        Raises:
            ConfigError: the run has several environments.
            ShardError: stored rollouts cannot be read.
        """
        if config.environments:
            raise ConfigError(
                "environments", len(config.environments), "logs are of one environment; name one"
            )
        kept = drop_duplicates(logged, _read_stored_digests(folder))
        left_out = kept.left_out
        by_prompt: dict[str, list[Trajectory]] = {}
        refused: list[str] = []
        for each, built in _build(kept.conversations, config, model):
            if isinstance(built, EpisodeError):
                refused.append(f"{each.source}: {built}")
            elif len(built.token_ids) > config.serve.max_model_len:
                left_out[f"have more than serve.max_model_len = {config.serve.max_model_len} tokens"] += 1
            else:
                by_prompt.setdefault(each.prompt_digest, []).append(built)
        if refused:
            left_out[f"are refused by the chat template (the first: {refused[0]})"] = len(refused)
        size, groups = config.rollout.group_size, list[Group]()
        for answers in by_prompt.values():
            whole = len(answers) // size * size
            groups += [tuple(answers[first : first + size]) for first in range(0, whole, size)]
            left_out[f"are not one of rollout.group_size = {size} answers to a prompt"] += (
                len(answers) - whole
            )
        return cls(groups, _next_step(folder), config.rollout.groups_per_step, +left_out)

    @property
    def n_steps(self) -> int:
        """Steps of the run once these groups are stored."""
        return self.first_step + -(-len(self.groups) // self.groups_per_step)

    def describe(self) -> str:
        """Return a line with the number of new conversations, and of those that are not imported and why."""
        n_new = sum(map(len, self.groups))
        rest = "".join(f"; {n} {reason}" for reason, n in self.left_out.items())
        return f"{n_new} new conversations in {len(self.groups)} groups{rest}"

    async def store(self, run: Run) -> None:
        """Store the plan and then the rollouts of each step; the rollouts of a step appear all at once.

        Raises:
            StoreError: another import has added steps since `plan`.
        """
        writer, env = run.store.writer, run.environments[0].name
        if _next_step(run.folder) != self.first_step:
            raise StoreError(
                f"another import has added steps to {run.folder.location} meanwhile; run it again"
            )
        for step in range(self.first_step, self.n_steps):
            begin = (step - self.first_step) * self.groups_per_step
            groups = self.groups[begin : begin + self.groups_per_step]
            planned = replace(run.shares.plan(step), n=len(groups))
            rows = make_plan_rows(run.id, step, [planned])
            # A killed import may have planned other groups, of which it stored none.
            is_planned = step in await asyncio.to_thread(list_steps, run.folder, "plans")
            await (writer.replace if is_planned else writer.append)("plans", rows, step=step)
            placed = [
                place_in_group(each, run.id, group, sample)
                for group, answers in enumerate(groups, planned.first)
                for sample, each in enumerate(answers)
            ]
            await writer.append("rollouts", rollout_rows(run.id, step, env, placed), step=step)


def _read_stored_digests(folder: RunFolder) -> frozenset[str]:
    """Read the digests of a run's conversations, as stored and with `started_at`, which earlier imports left out of them."""
    rows = read(folder, "rollouts", ["outcome", "started_at"]).to_pylist()
    stored = [(json.loads(row["outcome"]).get(DIGEST, ""), row["started_at"]) for row in rows]
    return frozenset({digest for digest, _ in stored} | {distinguish_digest(*each) for each in stored})


def _next_step(folder: RunFolder) -> int:
    return max(list_steps(folder, "rollouts"), default=-1) + 1


def _build(
    conversations: Sequence[LoggedConversation], config: RunConfig, model: Path
) -> Iterator[tuple[LoggedConversation, Trajectory | EpisodeError]]:
    """Yield each conversation with its trajectory, or why it has none."""
    rollout = config.rollout
    tokenizer = ChatTokenizer.load(model, rollout.chat_template, rollout.chat_template_kwargs)
    stop = () if needs_worker(rollout) else make_environment(rollout).stop
    for each in conversations:
        try:
            yield (
                each,
                build_logged_trajectory(
                    each, tokenizer=tokenizer, stop=stop, temperature=rollout.temperature
                ),
            )
        except EpisodeError as error:
            yield each, error
