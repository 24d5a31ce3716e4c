"""Log-probabilities of finished rollouts by other models than the sampler: the trainer's, and a reference policy's on vLLM servers."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.errors import ConfigError, RequestError, RollmillError
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.span_waits import TimedLock
from rollmill.tasks.observe.spans import current_lane, record_span, span, within
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import make_logprob_rows
from rollmill.tasks.store.reader import read, read_trajectories
from rollmill.tasks.store.rows import Rows, rows_from_table
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.segments import SEGMENT_COLUMNS, index_sequences, read_segments
from rollmill.tasks.store.stored_batch import list_origins

NO_STEP = -1

# Trajectories of one request to the trainer: a step that is ready to train waits for one such request at most.
BUNDLE_ROWS = 32

# Has the trainer compute the log-probabilities of trajectories of a step, and stores the rows.
Score = Callable[[int, Sequence[str]], Awaitable[None]]


class LogprobRecomputation:
    """Has the trainer compute log-probabilities of finished trajectories, in bundles, while it is idle at their step.

    The trainer computes what is missing when the step is trained. So a failed bundle is only counted.

    Args:
        bundle_rows: most trajectories in a bundle; training waits for at most one bundle.

    Attributes:
        hidden_s: seconds of the trainer's idle time that the current step's bundles used.
        n_failed: failed bundles so far.
    """

    def __init__(self, bundle_rows: int = BUNDLE_ROWS) -> None:
        self._bundle_rows = bundle_rows
        self._waiting: dict[int, list[str]] = defaultdict(list)
        self._step = NO_STEP
        self._wake = asyncio.Event()
        self._busy = TimedLock()
        self.hidden_s = 0.0
        self.n_failed = 0

    def add(self, step: int, trajectory_ids: Sequence[str]) -> None:
        """Queue stored trajectories of a step, whose log-probabilities the trainer shall compute."""
        self._waiting[step] += trajectory_ids
        self._wake.set()

    def begin(self, step: int) -> None:
        """Start sending the queued trajectories of a step, which the trainer has reached and not begun to train."""
        # Earlier steps are trained already, and do not need log-probabilities.
        self._waiting = defaultdict(list, {each: ids for each, ids in self._waiting.items() if each >= step})
        self._step, self.hidden_s = step, 0.0
        self._wake.set()

    async def end(self) -> float:
        """Stop sending bundles, and wait for the one that the trainer computes; returns the seconds waited.

        Call it before a step is trained. Trajectories that are still queued are left to the training step.
        """
        self._step, started = NO_STEP, time.perf_counter()
        async with self._busy:
            return time.perf_counter() - started

    def metrics(self, of_step: Sequence[Metric], waited_s: float) -> list[Metric]:
        """Return metrics: seconds of recomputation hidden in idle time, seconds added to the step, and failed bundles so far.

        Args:
            of_step: the trainer's metrics of the step, with the seconds for the missing log-probabilities.
            waited_s: seconds that training waited for a bundle.
        """
        in_step_s = sum(each.value for each in of_step if each.name == "train/trainer_logprobs_s")
        values = {
            "train/recompute_hidden_s": max(0.0, self.hidden_s - waited_s),
            "train/recompute_exposed_s": waited_s + in_step_s,
            "train/recompute_failures_so_far": float(self.n_failed),
        }
        return [Metric(name, "all", "value", value) for name, value in values.items()]

    async def work(self, score: Score) -> None:
        """Send bundles of queued trajectories to the trainer by `score`, until this task is cancelled."""
        while True:
            await self._wake.wait()
            # Before the bundles are sent: what is added meanwhile wakes the loop again.
            self._wake.clear()
            while bundle := self._take():
                async with self._busy:
                    await self._score(score, bundle)

    def _take(self) -> list[str]:
        waiting = self._waiting[self._step]
        bundle, self._waiting[self._step] = waiting[: self._bundle_rows], waiting[self._bundle_rows :]
        return bundle

    async def _score(self, score: Score, bundle: list[str]) -> None:
        started, step = time.perf_counter(), self._step
        # Training began while the lock was awaited.
        if step == NO_STEP:
            return
        try:
            await score(step, bundle)
        except RollmillError:
            self.n_failed += 1
        self.hidden_s += time.perf_counter() - started


READ = ("trajectory_id", "temperature", "token_ids", "loss_mask", *SEGMENT_COLUMNS)


class ReferenceServer(Protocol):
    """What is needed of a vLLM server with the reference policy of the KL term."""

    async def prompt_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return [T-1] nats: log p(token i+1 | tokens 0..i) of [T] tokens; RequestError if the server does not answer."""

    async def model(self) -> str:
        """Return the name of the model that the server serves."""


class Answer(NamedTuple):
    """A trajectory's [T] log-probabilities in nats by a model, NaN at tokens that the policy did not sample."""

    id: str
    model: str
    logprobs: np.ndarray


class ReferenceDeployment:
    """Requests trajectories' log-probabilities by a reference policy or a teacher from vLLM servers, and stores them.

    Args:
        store: stores the rows.
        servers: all with the same model.
        max_in_flight: concurrent requests.
        warn: prints a warning.
        policy: under which the rows are stored: `reference`, or a teacher's name.
        model: stored with each row; empty: the name that the server has for its model.
    """

    def __init__(
        self,
        store: OpenRun,
        servers: Sequence[ReferenceServer],
        max_in_flight: int,
        warn: Callable[[str], None],
        policy: str = "reference",
        model: str = "",
    ) -> None:
        self._store, self._servers, self._warn = store, servers, warn
        self._policy, self._model_name = policy, model
        self._slots = asyncio.Semaphore(max_in_flight)
        self._open_requests: Counter[ReferenceServer] = Counter()
        self._models: dict[ReferenceServer, str] = {}
        self._has_failed = False

    async def ask(self, step: int, rollouts: Rows) -> None:
        """Request the log-probabilities of new rollouts, concurrently with their scoring.

        If no server answers, sampling continues: the first failure is reported, and `complete` requests the rest.
        """
        lane = current_lane()
        try:
            with within(lane=f"{lane.name}/reference" if lane else None), span("recomputing"):
                await self.request(step, rollouts)
        except RequestError as error:
            if not self._has_failed:
                self._warn(f"train.kl.urls: {error}; the request is repeated before training")
            self._has_failed = True

    @record_span("recomputing")
    async def complete(self, step: int) -> None:
        """Request the missing log-probabilities of a step's stored batch.

        Raises:
            RequestError: no server answered; names the trajectory.
            ConfigError: a trajectory was sampled at a temperature other than 1.
        """
        for origin, origin_step, ids in await asyncio.to_thread(_find_missing, self._store.folder, step):
            rows = await asyncio.to_thread(read_trajectories, origin, origin_step, ids, READ)
            await self.request(step, rows_from_table(rows))

    async def request(self, step: int, rollouts: Rows) -> None:
        """Request log-probabilities for these rollouts concurrently, store those received, then raise the first error.

        Raises:
            RequestError: no server answered; names the trajectory.
            ConfigError: a trajectory was sampled at a temperature other than 1.
        """
        # Not a TaskGroup: one failed request must not cancel the others, whose answers are stored.
        outcomes = await asyncio.gather(
            *(self._answer(row) for row in rollouts.select(READ).to_pylist()), return_exceptions=True
        )
        answers = [each for each in outcomes if isinstance(each, Answer)]
        if answers:
            ids, models, logprobs = zip(*answers, strict=True)
            rows = make_logprob_rows(self._store.manifest.run, step, models, ids, logprobs)
            await self._store.writer.append("logprobs", rows, policy=self._policy, step=step)
        for each in outcomes:
            if isinstance(each, BaseException):
                raise each

    async def _answer(self, row: dict[str, Any]) -> Answer:
        name, mask = str(row["trajectory_id"]), np.array(row["loss_mask"], bool)
        token_ids, segments = np.array(row["token_ids"], np.int32), read_segments(row)
        if row["temperature"] != 1.0:
            remedy = (
                f"trajectory {name} was sampled at temperature {row['temperature']}, and vLLM does not divide the "
                "logits of a prompt by a temperature: set train.kl.reference to frozen"
            )
            raise ConfigError("train.kl.reference", "deployment", remedy)
        logprobs, sequences = np.full(len(mask), np.nan, np.float32), index_sequences(segments, len(mask))
        async with self._slots:
            for segment, sequence in zip(segments, sequences, strict=True):
                own = np.arange(segment.prefix_tokens, len(sequence))
                trained = own[mask[sequence[own]]]
                if len(trained) or segment is segments[0]:
                    server, found = await self._request(name, token_ids[sequence])
                    logprobs[sequence[trained]] = found[trained - 1]
            return Answer(name, await self._model(server), logprobs)

    async def _request(self, name: str, token_ids: np.ndarray) -> tuple[ReferenceServer, np.ndarray]:
        """Return the server that answered and its [T-1] nats; servers with fewer open requests are tried first."""
        errors: list[RequestError] = []
        for server in sorted(self._servers, key=lambda each: self._open_requests[each]):
            self._open_requests[server] += 1
            try:
                return server, await server.prompt_logprobs(token_ids)
            except RequestError as error:
                errors.append(error)
            finally:
                self._open_requests[server] -= 1
        raise RequestError(
            f"no {self._policy} server answers for trajectory {name}: {errors[-1]}"
        ) from errors[-1]

    async def _model(self, server: ReferenceServer) -> str:
        if self._model_name:
            return self._model_name
        if server not in self._models:
            self._models[server] = await server.model()
        return self._models[server]


def _find_missing(folder: RunFolder, step: int) -> list[tuple[RunFolder, int, list[str]]]:
    """Find the trajectories of a step's batch without reference log-probabilities: (run, step, ids) where they were sampled."""
    stored = set(
        read(folder, "logprobs", ["trajectory_id"], policy="reference", step=step)[
            "trajectory_id"
        ].to_pylist()
    )
    return [
        (origin, origin_step, missing)
        for origin, origin_step, ids in list_origins(folder, step)
        if (missing := [each for each in ids if each not in stored])
    ]


@asynccontextmanager
async def open_reference(store: OpenRun, config: RunConfig) -> AsyncIterator[ReferenceDeployment | None]:
    """Connect to the vLLM servers of train.kl.urls; yield None if train.kl.reference is not `deployment`."""
    if config.train.kl.reference != "deployment":
        yield None
        return
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(VllmClient(url, config.serve)) for url in config.train.kl.urls
        ]
        yield ReferenceDeployment(store, clients, config.rollout.max_in_flight, say)
