"""The vLLM servers of a run: kept at the policy's current version, verified, started again when they fail."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from flows.failure import one_error
from flows.progress import say
from flows.run import Run
from flows.services import ServerService, restart
from tasks.errors import ConfigError, ParityError, RequestError, SyncError
from tasks.rollout.environment import Message
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.store.batch import stored_sequences
from tasks.store.reader import scan
from tasks.sync.drive import SyncReport, check_parity, join
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

    Every method is called with the trainer's weights held still.
    """

    def __init__(self, run: Run, trainer: TrainerClient, servers: Sequence[ServerService]) -> None:
        self._run, self._trainer = run, trainer
        self.every = tuple(servers)
        self._joined: dict[ServerService, int] = {}
        self._restarts = dict.fromkeys(servers, 0)
        self._parity_at_0 = differences_at_start(run)

    async def bring_up(self, version: PolicyVersion, *, only_name: bool = False) -> list[SyncReport]:
        """Give every server the trainer's weights, all at once, or the version's name alone."""
        with one_error():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._bring_up(each, version, only_name)) for each in self.every]
        return [task.result() for task in tasks]

    async def bring_back(self, server: ServerService, version: PolicyVersion, reason: str) -> SyncReport:
        """Start a failed server again and give it the trainer's weights.

        Raises:
            ServiceDiedError: it is not ours to start, or was started again too often.
        """
        self._run.pool.set_aside(server.client)
        await restart(server, reason, self._restarts[server], self._run.config.serve.max_restarts)
        self._restarts[server] += 1
        self._joined.pop(server, None)
        return await self._sync(server, version)

    async def is_current(self, server: ServerService, version: PolicyVersion) -> bool:
        """True when a server that seemed to have failed answers after all, and has the trainer's version."""
        try:
            return await server.client.is_healthy() and await server.client.version() == str(version)
        except RequestError:
            return False

    async def _bring_up(self, server: ServerService, version: PolicyVersion, only_name: bool) -> SyncReport:
        try:
            if only_name and self._joined.get(server) == version.incarnation:
                await server.client.set_version(str(version))
                return SyncReport(server.client.url, 0, 0.0, math.nan)
            return await self._sync(server, version)
        except (SyncError, RequestError) as error:
            if isinstance(error, ParityError) and server.process is None:
                raise
            return await self.bring_back(server, version, str(error))

    async def _sync(self, server: ServerService, version: PolicyVersion) -> SyncReport:
        """Send, compare, and let in; weights that fail the comparison are sent once more."""
        config, client = self._run.config.sync, server.client
        if self._joined.get(server) != version.incarnation:
            await self._check_tokenizer(client)
            await join(self._trainer, client, config)
            self._joined[server] = version.incarnation
        stats = await self._send(client, version)
        try:
            difference = await self._compare(server, version)
        except ParityError as error:
            say(f"{error}; sending it once more")
            stats = await self._send(client, version)
            difference = await self._compare(server, version)
        if (reported := await client.version()) != str(version):
            raise SyncError(f"server {client.url} reports version {reported} after a sync of {version}")
        await self._run.pool.admit(client)
        return SyncReport(client.url, int(stats["bytes"]), float(stats["seconds"]), difference)

    async def _send(self, client: VllmClient, version: PolicyVersion) -> dict[str, Any]:
        self._run.recording.started()
        return await send_weights(self._trainer, client, str(version), self._run.config.sync)

    async def _check_tokenizer(self, client: VllmClient) -> None:
        """Refuse a server that reads a prompt as other tokens than we do.

        Raises:
            ConfigError: it has another tokenizer or chat template.
        """
        messages = await self._opening(0)
        ours, theirs = (
            self._run.player.tokenizer.encode(messages).tolist(),
            await self._tokens(client, messages),
        )
        if ours != theirs:
            remedy = f"its tokenizer or chat template is not the model's: it reads a prompt as {theirs}, not as {ours}"
            raise ConfigError("serve.urls", client.url, remedy)

    async def _tokens(self, client: VllmClient, messages: Sequence[Message]) -> list[int]:
        if self._run.player.tokenizer.has_template:
            return await client.tokenize_chat(
                [{"role": each.role, "content": each.content} for each in messages]
            )
        return await client.tokenize("".join(each.content for each in messages))

    async def _compare(self, server: ServerService, version: PolicyVersion) -> float:
        """Largest difference in log-probability, in nats; at version 0 it calibrates the threshold."""
        config = self._run.config
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
        n = self._run.config.sync.parity_sequences
        found = stored_sequences(self._run.folder, version - 1, n) if version else []
        return found or [await self._prompt(index) for index in range(n)]

    async def _prompt(self, index: int) -> np.ndarray:
        return self._run.player.tokenizer.encode(await self._opening(index))

    async def _opening(self, index: int) -> Sequence[Message]:
        environment = self._run.environment
        episode = environment.episode(await environment.example("train", index), seed=0)
        opening = await episode.reply(())
        await episode.close()
        return opening
