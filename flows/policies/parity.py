"""Whether the servers compute what the trainer computes: tokenizer, and log-probabilities of known tokens."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from flows.config import RunConfig
from flows.policies.openings import Openings
from flows.running.run import Run
from tasks.errors import ConfigError
from tasks.observe.metrics import ALL, Metric
from tasks.rollout.environment import Message
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.store.batch import stored_sequences
from tasks.store.reader import scan
from tasks.sync.drive import Scorer, check_parity
from tasks.sync.parity import threshold_of

FIRST_RATIO = "train/first_ratio_deviation"
"""Metric: mean abs(ratio - 1) of each rank's first micro-batch."""

AT_START = "sync/logprob_difference_at_start"
"""Metric of step 0: the largest difference at version 0, from which thresholds are calibrated."""


def differences_at_start(run: Run) -> list[float]:
    """The differences that this run, or an earlier process of it, measured at version 0, in nats."""
    stored = scan(run.folder, "metrics", step=0).filter(pl.col("name") == AT_START)
    return [float(value) for value in stored.select("value").collect()["value"]]


def ratio_warning(config: RunConfig, step: int, metrics: Sequence[Metric]) -> str:
    """What to say of a step whose ratios are not 1 where they must be, before its first update; empty when all is well.

    They must be where the step was sampled by the policy that it trains, and both compute in single precision.
    """
    is_exact = config.train.dtype == config.serve.dtype == "float32"
    is_on_policy = config.rollout.max_staleness == 0 and config.train.behaviour == "sampler"
    found = [each.value for each in metrics if (each.name, each.env) == (FIRST_RATIO, ALL)]
    if not (is_exact and is_on_policy and found) or found[0] <= config.sync.ratio_threshold:
        return ""
    return (
        f"step {step}: the trainer gives the sampled tokens other probabilities than the servers that sampled them: "
        f"abs(ratio - 1) is {found[0]:.2g} on average before the first update, sync.ratio_threshold is "
        f"{config.sync.ratio_threshold:g}; compare the weights: rollmill verify-sync"
    )


def openings_of(run: Run) -> Openings:
    """The openings of a run's training problems."""
    return Openings(
        run.environment,
        run.player.tokenizer,
        max_tokens=run.config.serve.max_model_len,
        timeout_s=run.config.rollout.env_timeout_s,
    )


async def check_tokenizer(openings: Openings, server: VllmClient) -> None:
    """Refuse a server that reads a prompt as other tokens than we do.

    Raises:
        ConfigError: it has another tokenizer or chat template.
        EpisodeError: the environment gives no prompt to compare on.
    """
    (opening,) = await openings.first(1)
    ours = opening.token_ids.tolist()
    theirs = await _tokens(server, opening.messages, has_template=openings.tokenizer.has_template)
    if ours != theirs:
        remedy = (
            f"its tokenizer or chat template is not the model's: it reads a prompt as {theirs}, not as {ours}"
        )
        raise ConfigError("serve.urls", server.url, remedy)


async def _tokens(server: VllmClient, messages: Sequence[Message], *, has_template: bool) -> list[int]:
    if has_template:
        return await server.tokenize_chat([{"role": each.role, "content": each.content} for each in messages])
    return await server.tokenize("".join(each.content for each in messages))


@dataclass(frozen=True, slots=True)
class Expected:
    """What the trainer says of known tokens at one version; a Scorer that asks the trainer once for all servers."""

    parity: "Parity"
    version: PolicyVersion

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Those of the sequences that servers are compared on."""
        return await self.parity.expect(self.version)


class Parity:
    """Compares servers with the trainer, which is asked once for each version.

    Args:
        run: the run that the servers sample for.
        trainer: who is compared with.
    """

    def __init__(self, run: Run, trainer: Scorer) -> None:
        self._run, self._trainer = run, trainer
        self._at_0 = differences_at_start(run)
        self._openings = openings_of(run)
        # one asks the trainer, or reads the batch, for all: who waits for the trainer books it to that
        self._asking, self._choosing = asyncio.Lock(), asyncio.Lock()
        self._known: tuple[str, list[list[float]]] = "", []
        self._chosen: tuple[str, Sequence[np.ndarray]] = "", ()

    async def sequences(self, version: PolicyVersion) -> Sequence[np.ndarray]:
        """[B] arrays of the token ids that servers are compared on, [T] each; read once for each version."""
        async with self._choosing:
            if self._chosen[0] != str(version):
                self._chosen = str(version), await self._choose(version.version)
            return self._chosen[1]

    async def expect(self, version: PolicyVersion) -> list[list[float]]:
        """[B][T-1] raw log-probabilities in nats, by the trainer, which stands at that version, of these tokens."""
        async with self._asking:
            if self._known[0] != str(version):
                listed = [sequence.tolist() for sequence in await self.sequences(version)]
                self._known = str(version), await self._trainer.logprobs(listed) if listed else []
            return self._known[1]

    async def compare(self, server: VllmClient, version: PolicyVersion) -> float:
        """Largest difference in log-probability, in nats; at version 0 it calibrates the threshold.

        Raises:
            ParityError: it is above the threshold.
            SyncError: it could not be found out in time.
        """
        config = self._run.config
        threshold = threshold_of(config.train.dtype, config.sync.parity_threshold, self._at_0)
        if version.version == 0 and config.train.dtype != "float32":
            threshold = math.inf
        difference = await check_parity(
            Expected(self, version),
            server,
            await self.sequences(version),
            str(version),
            threshold=threshold,
            timeout_s=config.sync.timeout_s,
        )
        if version.version == 0:
            self._at_0.append(difference)
        return difference

    async def check_tokenizer(self, server: VllmClient) -> None:
        """Refuse a server that reads a prompt as other tokens than we do.

        Raises:
            ConfigError: it has another tokenizer or chat template.
            EpisodeError: the environment gives no prompt to compare on.
        """
        await check_tokenizer(self._openings, server)

    async def _choose(self, version: int) -> Sequence[np.ndarray]:
        """Token ids of the batch just trained, or of the first prompts when there is none."""
        n = self._run.config.sync.parity_sequences
        if version and (found := await asyncio.to_thread(stored_sequences, self._run.folder, version - 1, n)):
            return found
        return [opening.token_ids for opening in await self._openings.first(n)]
