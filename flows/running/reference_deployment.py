"""The vLLM servers of the reference policy: asked for log-probabilities of trajectories, which are kept as rows."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, Protocol

import numpy as np

from flows.config import RunConfig
from flows.ui.progress import say
from tasks.errors import ConfigError, RequestError
from tasks.observe.spans import current_lane, span, spanned, within
from tasks.serve.client import VllmClient
from tasks.store.layout import RunFolder
from tasks.store.logprobs import at_trained, logprob_rows
from tasks.store.reader import read, read_trajectories, scan
from tasks.store.rows import Rows, rows_of
from tasks.store.run import OpenRun

READ = ("trajectory_id", "temperature", "token_ids", "loss_mask")


class ReferenceServer(Protocol):
    """A server of the reference policy."""

    async def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """[T-1] nats: log p(token i+1 | tokens 0..i); RequestError when it does not answer."""

    async def model(self) -> str:
        """The name of what it serves."""


class Answer(NamedTuple):
    """A trajectory's [T] log-probabilities in nats, NaN where the policy did not sample, and whose they are."""

    id: str
    model: str
    logprobs: np.ndarray


class ReferenceDeployment:
    """Asks the reference servers about each trajectory once: what is stored is never asked for again.

    Args:
        store: takes the rows.
        servers: which all have the same model.
        max_in_flight: requests at a time.
        warn: tells people something.
    """

    def __init__(
        self,
        store: OpenRun,
        servers: Sequence[ReferenceServer],
        max_in_flight: int,
        warn: Callable[[str], None],
    ) -> None:
        self._store, self._servers, self._warn = store, servers, warn
        self._slots = asyncio.Semaphore(max_in_flight)
        self._under_way: Counter[ReferenceServer] = Counter()
        self._models: dict[ReferenceServer, str] = {}
        self._has_failed = False

    async def ask(self, step: int, rollouts: Rows) -> None:
        """Ask about rollouts that have just been sampled, beside their scoring.

        When no server answers, it is said once and left to `complete`, so that sampling goes on.
        """
        lane = current_lane()
        try:
            with within(lane=f"{lane.name}/reference" if lane else None), span("recomputing"):
                await self._ask(step, rollouts)
        except RequestError as error:
            if not self._has_failed:
                self._warn(f"train.kl.urls: {error}; it is asked again before training")
            self._has_failed = True

    @spanned("recomputing")
    async def complete(self, step: int) -> None:
        """Ask about the trajectories of a step's stored batch that have no row yet.

        Raises:
            RequestError: no server answered; names the trajectory.
            ConfigError: a trajectory was sampled at another temperature than 1.
        """
        for origin, origin_step, ids in await asyncio.to_thread(_lacking, self._store.folder, step):
            rows = await asyncio.to_thread(read_trajectories, origin, origin_step, ids, READ)
            await self._ask(step, rows_of(rows))

    async def _ask(self, step: int, rollouts: Rows) -> None:
        """Store what is answered, also when some is not, whose first error is raised."""
        outcomes = await asyncio.gather(
            *(self._answer(row) for row in rollouts.select(READ).to_pylist()), return_exceptions=True
        )
        answers = [each for each in outcomes if isinstance(each, Answer)]
        if answers:
            ids, models, logprobs = zip(*answers, strict=True)
            rows = logprob_rows(self._store.manifest.run, step, models, ids, logprobs)
            await self._store.writer.append("logprobs", rows, policy="reference", step=step)
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each

    async def _answer(self, row: dict[str, object]) -> Answer:
        name, mask = str(row["trajectory_id"]), np.array(row["loss_mask"], bool)
        if row["temperature"] != 1.0:
            remedy = (
                f"trajectory {name} was sampled at temperature {row['temperature']}, and vLLM does not divide the logits "
                "of a prompt by one: set train.kl.reference to frozen"
            )
            raise ConfigError("train.kl.reference", "deployment", remedy)
        async with self._slots:
            server, found = await self._asked(name, np.array(row["token_ids"], np.int32))
            return Answer(name, await self._model(server), at_trained(mask, found[mask[1:]]))

    async def _asked(self, name: str, token_ids: np.ndarray) -> tuple[ReferenceServer, np.ndarray]:
        """[T-1] nats from the server with the fewest requests under way; from the next one when it does not answer."""
        errors: list[RequestError] = []
        for server in sorted(self._servers, key=lambda each: self._under_way[each]):
            self._under_way[server] += 1
            try:
                return server, await server.prompt_logprobs(token_ids)
            except RequestError as error:
                errors.append(error)
            finally:
                self._under_way[server] -= 1
        raise RequestError(f"no reference server answers for trajectory {name}: {errors[-1]}") from errors[-1]

    async def _model(self, server: ReferenceServer) -> str:
        if server not in self._models:
            self._models[server] = await server.model()
        return self._models[server]


def _lacking(folder: RunFolder, step: int) -> list[tuple[RunFolder, int, list[str]]]:
    """Ids of a step's batch that have no row, by the run and step that their rollouts lie in."""
    batch = scan(folder, "batches", ["trajectory_id", "source", "source_step"], step=step).collect()
    stored = read(folder, "logprobs", ["trajectory_id"], policy="reference", step=step)
    lacking = batch.filter(~batch["trajectory_id"].is_in(stored["trajectory_id"].to_pylist()))
    return [
        (RunFolder(str(source)) if source else folder, int(str(source_step)), rows["trajectory_id"].to_list())
        for (source, source_step), rows in lacking.group_by("source", "source_step", maintain_order=True)
    ]


@asynccontextmanager
async def open_reference(store: OpenRun, config: RunConfig) -> AsyncIterator[ReferenceDeployment | None]:
    """The deployment that `train.kl` names; None when the reference lies elsewhere, or nowhere."""
    if config.train.kl.reference != "deployment":
        yield None
        return
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(VllmClient(url, config.serve)) for url in config.train.kl.urls
        ]
        yield ReferenceDeployment(store, clients, config.rollout.max_in_flight, say)
