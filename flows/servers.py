"""The vLLM servers of a run: kept at the policy's current version, verified, set aside when they fail."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import polars as pl

from flows.failure import one_error
from flows.openings import Openings
from flows.progress import say
from flows.run import Run
from flows.services import ServerService
from tasks.errors import (
    ConfigError,
    ParityError,
    RequestError,
    RollmillError,
    ServiceDiedError,
    SyncError,
)
from tasks.rollout.environment import Message
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.store.batch import stored_sequences
from tasks.store.reader import scan
from tasks.sync.drive import SyncReport, check_parity, new_prefix
from tasks.sync.order import WeightAnswer
from tasks.sync.parity import threshold_of
from tasks.sync.task import send_weights
from tasks.train.client import TrainerClient

AT_START = "sync/logprob_difference_at_start"
"""Metric of step 0: the largest difference at version 0, from which thresholds are calibrated."""


def differences_at_start(run: Run) -> list[float]:
    """The differences that this run, or an earlier process of it, measured at version 0, in nats."""
    stored = scan(run.folder, "metrics", step=0).filter(pl.col("name") == AT_START)
    return [float(value) for value in stored.select("value").collect()["value"]]


class Servers:
    """Brings servers to the trainer's version; a server is in the pool only while it is there.

    `bring_up` and `rejoin` are called with the trainer's weights held still.

    Attributes:
        run: the run that they sample for.
        every: all servers of the run.
        failed: those that are being brought back, by their watchers; how they failed.
        mute: those of them that answer and cannot sample.
        lost: those that were given up.
        are_up: set when all have been brought up for the first time.
    """

    def __init__(self, run: Run, trainer: TrainerClient, servers: Sequence[ServerService]) -> None:
        self.run, self._trainer = run, trainer
        self.every = tuple(servers)
        self.failed: dict[ServerService, str] = {}
        self.mute: set[ServerService] = set()
        self.lost: set[ServerService] = set()
        self.are_up = asyncio.Event()
        self._joined: dict[ServerService, tuple[int, str]] = {}
        self._verified: dict[
            ServerService, str
        ] = {}  # the name of the weights that a server is known to have
        self._parity_at_0 = differences_at_start(run)
        self._openings = Openings(
            run.environment,
            run.player.tokenizer,
            max_tokens=run.config.serve.max_model_len,
            timeout_s=run.config.rollout.env_timeout_s,
        )

    async def bring_up(self, version: PolicyVersion, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server the trainer's weights, all at once, or the version's name alone.

        One that fails is left to its watcher; those that have failed before are not waited for.
        """
        servers = [each for each in self.every if each not in self.failed and each not in self.lost]
        with one_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._bring_up(each, version, only_name)) for each in servers]
        self.are_up.set()
        return [report for task in tasks if (report := task.result())]

    async def rejoin(self, server: ServerService, version: PolicyVersion) -> None:
        """Let a server in that failed and answers again; it gets the trainer's weights unless it still has them.

        Raises:
            SyncError, RequestError: it failed again.
            ConfigError: it has another tokenizer or chat template than before.
        """
        self.failed.pop(server, None)
        self.mute.discard(server)
        self.run.pool.answered(server.client)
        try:
            if await self._has(server, str(version)):
                self.run.pool.admit(server.client)
            else:
                self._joined.pop(server, None)
                await self._sync(server, version)
        except RollmillError as error:
            await self.fail(server, str(error))
            raise
        say(f"{server.name} is back, at version {version.version}")

    async def look_again(self, server: ServerService) -> None:
        """Let a server in that was set aside and still has its weights, and samples when that was in doubt.

        While it gets new ones, it is let in by who sends them.
        """
        verified = self._verified.get(server)
        if verified is None or server in self.failed:
            return
        has_weights = await self._has(server, verified)
        can_sample = has_weights and await self._can_sample(server)
        if self._verified.get(server) != verified:
            return
        if can_sample:
            self.run.pool.admit(server.client)
        elif has_weights:
            self.mute.add(server)
            await self.fail(server, "it answers /health and fails generations")
        else:
            await self.fail(server, "it no longer has the policy's weights")

    async def fail(self, server: ServerService, reason: str) -> None:
        """Ask a server no more, cut its requests off, which go to others, and leave it to its watcher."""
        self.failed[server] = reason
        self._verified.pop(server, None)
        self.run.pool.set_aside(server.client)
        self.alarm(server).set()
        await server.client.close()

    def give_up(self, server: ServerService, reason: str, log_tail: str = "") -> None:
        """Go on without a server.

        Raises:
            ServiceDiedError: it was the last one.
        """
        self.lost.add(server)
        self.run.pool.set_aside(server.client)
        n_left = len(self.every) - len(self.lost)
        if not n_left:
            raise ServiceDiedError(server.name, reason, log_tail)
        say(f"{server.name}: {reason.splitlines()[0]}; going on with {n_left} of {len(self.every)} servers")

    def alarm(self, server: ServerService) -> asyncio.Event:
        """Set when there is reason to look whether a server has failed."""
        return self.run.pool.alarm(server.client)

    async def _has(self, server: ServerService, name: str) -> bool:
        """True when a server answers, and is known to have the weights of that name."""
        try:
            is_healthy = await server.client.is_healthy()
            return is_healthy and self._verified.get(server) == name == await server.client.version()
        except RequestError:
            return False

    async def _can_sample(self, server: ServerService) -> bool:
        """True when a server samples; one that has not failed many requests in a row is not asked."""
        if not self.run.pool.is_suspect(server.client):
            return True
        if not await server.client.can_sample():
            return False
        self.run.pool.answered(server.client)
        return True

    async def _bring_up(
        self, server: ServerService, version: PolicyVersion, only_name: bool
    ) -> SyncReport | None:
        try:
            if only_name and self._is_joined(server, version):
                self._verified.pop(server, None)
                await server.client.set_version(str(version))
                self._let_in(server, version)
                return SyncReport(server.client.url, 0, 0.0, math.nan)
            return await self._sync(server, version)
        except (SyncError, RequestError) as error:
            await self.fail(server, str(error))
            return None

    async def _sync(self, server: ServerService, version: PolicyVersion) -> SyncReport:
        """Send, compare, and let in; weights that fail the comparison are sent once more."""
        client = server.client
        self._verified.pop(server, None)
        if not await client.is_healthy():
            raise SyncError(f"server {client.url} does not answer /health")
        if not self._is_joined(server, version):
            await self._check_tokenizer(client)
            self._joined[server] = version.incarnation, new_prefix()
        answer = await self._send(server, version)
        try:
            difference = await self._compare(server, version)
        except ParityError as error:
            say(f"{error}; sending it once more")
            answer = await self._send(server, version)
            difference = await self._compare(server, version)
        if (reported := await client.version()) != str(version):
            raise SyncError(f"server {client.url} reports version {reported} after a sync of {version}")
        self._let_in(server, version)
        return SyncReport(client.url, answer.bytes, answer.received_s, difference)

    def _let_in(self, server: ServerService, version: PolicyVersion) -> None:
        if server in self.failed:
            raise SyncError(f"server {server.client.url} failed during a sync: {self.failed[server]}")
        self._verified[server] = str(version)
        self.run.pool.admit(server.client)

    def _is_joined(self, server: ServerService, version: PolicyVersion) -> bool:
        """True when it has links to the trainer of this incarnation."""
        return self._joined.get(server, (-1, ""))[0] == version.incarnation

    async def _send(self, server: ServerService, version: PolicyVersion) -> WeightAnswer:
        self.run.recording.started()
        _, prefix = self._joined[server]
        return await send_weights(self._trainer, server.client, str(version), self.run.config.sync, prefix)

    async def _check_tokenizer(self, client: VllmClient) -> None:
        """Refuse a server that reads a prompt as other tokens than we do.

        Raises:
            ConfigError: it has another tokenizer or chat template.
            EpisodeError: the environment gives no prompt to compare on.
        """
        (opening,) = await self._openings.first(1)
        ours, theirs = opening.token_ids.tolist(), await self._tokens(client, opening.messages)
        if ours != theirs:
            remedy = f"its tokenizer or chat template is not the model's: it reads a prompt as {theirs}, not as {ours}"
            raise ConfigError("serve.urls", client.url, remedy)

    async def _tokens(self, client: VllmClient, messages: Sequence[Message]) -> list[int]:
        if self.run.player.tokenizer.has_template:
            return await client.tokenize_chat(
                [{"role": each.role, "content": each.content} for each in messages]
            )
        return await client.tokenize("".join(each.content for each in messages))

    async def _compare(self, server: ServerService, version: PolicyVersion) -> float:
        """Largest difference in log-probability, in nats; at version 0 it calibrates the threshold."""
        config = self.run.config
        threshold = threshold_of(config.train.dtype, config.sync.parity_threshold, self._parity_at_0)
        if version.version == 0 and config.train.dtype != "float32":
            threshold = math.inf
        sequences = await self._sequences(version.version)
        difference = await check_parity(
            self._trainer,
            server.client,
            sequences,
            str(version),
            threshold=threshold,
            timeout_s=config.sync.timeout_s,
        )
        if version.version == 0:
            self._parity_at_0.append(difference)
        return difference

    async def _sequences(self, version: int) -> list[np.ndarray]:
        """Token ids to compare on: of the batch just trained, or the first prompts when there is none."""
        n = self.run.config.sync.parity_sequences
        if version and (found := await asyncio.to_thread(stored_sequences, self.run.folder, version - 1, n)):
            return found
        return [opening.token_ids for opening in await self._openings.first(n)]
