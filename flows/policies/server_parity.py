"""Parity of servers and trainer: the same log-probabilities of known tokens."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import numpy as np
import polars as pl

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import list_altered
from rollmill.flows.policies.sync_report import DIFFERENCE_HIGH, DIFFERENCE_MEAN
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run
from rollmill.tasks.errors import (
    ConfigError,
    EpisodeError,
    EpisodeTimeoutError,
    RequestError,
    ServiceError,
    SyncError,
    describe_error,
)
from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer, Tools
from rollmill.tasks.rollout.environment import Environment, Message
from rollmill.tasks.rollout.environment_calls import (
    check_example,
    check_opening,
    guard_environment_code,
)
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.stored_batch import read_batch_sequences
from rollmill.tasks.sync.broadcast import fetch_logprobs, name_errors, score_by_server
from rollmill.tasks.sync.weight_parity import (
    NOT_COMPARED,
    START_LIMITS,
    WINDOW,
    LogprobDifferences,
    Logprobs,
    Movement,
    ParityWindow,
    find_excess,
)
from rollmill.tasks.train.service.trainer_client import TrainerClient

Value = TypeVar("Value")

# Problems that may fail before the environment counts as failing.
MAX_PASSED_OVER = 16


@dataclass(frozen=True, slots=True)
class Opening:
    """The first messages of an episode, as text and as token ids.

    Attributes:
        messages: what the environment says before the first answer.
        tools: what the policy may call.
        token_ids: [T] int32, the tokenized messages and tools; the last of them if only these are used.
    """

    messages: tuple[Message, ...]
    tools: Tools
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Openings:
    """Gives the first messages of the training problems, as prompts on which servers are checked.

    Attributes:
        environment: of the run.
        tokenizer: of the policy.
        max_tokens: an opening has fewer tokens than this.
        timeout_s: seconds for a problem, for its opening, and for closing the episode.
        kept_tokens: of a longer opening, the last tokens that are used; 0: all.
    """

    environment: Environment
    tokenizer: ChatTokenizer
    max_tokens: int
    timeout_s: float
    kept_tokens: int = 0

    async def first(self, n: int) -> Sequence[Opening]:
        """Return the first messages of the first `n` training problems, in order; problems that fail are passed over.

        There are fewer, at least one, if the split has no more problems or too many fail.

        Raises:
            EpisodeError: the first MAX_PASSED_OVER problems and one more failed, or all there are.
            ServiceError: the environment's worker processes cannot be brought back.
        """
        found: list[Opening] = []
        failure: EpisodeError | None = None
        n_failed = 0
        for index in range(self.environment.size("train")):
            if len(found) == n or n_failed > MAX_PASSED_OVER:
                break
            try:
                found.append(await self._open(index))
            except ServiceError:
                raise
            except Exception as error:  # noqa: BLE001 - user code: another problem may have an opening
                where = f"environment {self.environment.name}: the opening of training problem {index} failed"
                failure = EpisodeError(f"{where}: {': '.join(describe_error(error))}")
                failure.__cause__, n_failed = error, n_failed + 1
                say(f"{failure}; servers are not checked on it")
        if failure and not found:
            raise failure
        return found

    async def _open(self, index: int) -> Opening:
        async with self._limit_time("answer"):
            problem = check_example(await self.environment.example("train", index))
        with guard_environment_code():
            episode = self.environment.episode(problem, seed=0)
        try:
            async with self._limit_time("answer"):
                opening = check_opening(await episode.reply(()), self.environment)
        except BaseException:
            # The first error is the one to report.
            with suppress(Exception):
                async with self._limit_time("close its episode"):
                    await episode.close()
            raise
        async with self._limit_time("close its episode"):
            await episode.close()
        tools = opening.tools or ()
        token_ids = self.tokenizer.encode(opening.messages, tools)[-self.kept_tokens :]
        if len(token_ids) >= self.max_tokens:
            raise EpisodeError(
                f"it has {len(token_ids)} tokens, and serve.max_model_len is {self.max_tokens}"
            )
        return Opening(tuple(opening.messages), tools, token_ids)

    @asynccontextmanager
    async def _limit_time(self, what: str) -> AsyncIterator[None]:
        """Limit the block, a call of user code, to `timeout_s` seconds; EpisodeTimeoutError if it takes longer.

        `what` says in the error what the code did not do, such as "answer".
        """
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                with guard_environment_code():
                    yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"it did not {what} within rollout.env_timeout_s = {self.timeout_s:g} s"
            raise EpisodeTimeoutError(text) from error


# Metric: mean abs(ratio - 1) of each rank's first micro-batch.
FIRST_RATIO = "train/first_ratio_deviation"

# Metric: abs(log p - log mu) of trained tokens, in nats.
MISMATCH = "train/mismatch_nats"

# Rounding differences of two float32 implementations are far below this.
RATIO_THRESHOLD = 1e-3
# In half precision rounding gives 0.0005 for the quickstart's model and some 0.02 for large ones.
HALF_RATIO_THRESHOLD = 0.1

# Metrics of step 0: the largest and the mean difference at version 0.
AT_START, AT_START_MEAN = "sync/logprob_difference_at_start", "sync/logprob_difference_at_start_mean"


@dataclass(slots=True)
class ServedRun:
    """The parts of a run that its servers and their weight sync use.

    Attributes:
        id: random id of the run.
        folder: the run's folder.
        config: all settings.
        pool: the servers that receive requests.
        openings: prompts on which servers are compared.
    """

    id: str
    folder: RunFolder
    config: RunConfig
    pool: ServerPool
    openings: Openings

    @classmethod
    def of(cls, run: Run) -> Self:
        """Take the parts from an open run.

        The openings are the first messages of the training problems of its first environment with tools, or else of its first one.
        """
        chosen = next((each for each in run.environments if each.environment.tools), run.environments[0])
        limit = chosen.player.prompt_limit
        openings = Openings(
            chosen.environment,
            chosen.player.tokenizer,
            max_tokens=run.config.serve.max_model_len,
            timeout_s=chosen.config.rollout.env_timeout_s,
            kept_tokens=limit.kept_tokens if limit else 0,
        )
        return cls(run.id, run.folder, run.config, run.pool, openings)


def ratio_warning(config: RunConfig, step: int, metrics: Sequence[Metric]) -> str:
    """Return a warning if trainer and servers give a step's sampled tokens other probabilities where they must not; else empty.

    They are equal, but for rounding, where a step trains the policy version that sampled it from the distribution that is trained;
    stored rollouts of earlier steps or of other runs are of other policies.
    """
    is_exact = config.train.dtype == config.serve.dtype == "float32"
    threshold = RATIO_THRESHOLD if is_exact else HALF_RATIO_THRESHOLD
    # The trainer's own log-probabilities before the step are those of the version that sampled, too.
    name, what = (
        (FIRST_RATIO, "abs(ratio - 1)")
        if config.train.old_logprobs == "sampler"
        else (MISMATCH, "the difference of log-probabilities")
    )
    found = [each.value for each in metrics if (each.name, each.env, each.stat) == (name, ALL, "mean")]
    is_stale = config.rollout.max_staleness or config.rollout.replay.share or config.retrain.sources
    is_other = is_stale or list_altered(config)
    if is_other or not found or found[0] <= threshold:
        return ""
    return (
        f"step {step}: the trainer gives the sampled tokens other probabilities than the servers that sampled them: "
        f"{what} is {found[0]:.2g} on average before the first update, and should be at most "
        f"{threshold:g}; compare the weights: rollmill verify-sync"
    )


class Latest(Generic[Value]):
    """Cache of one value, that of the latest key; concurrent calls for the same key share one fetch."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._found: tuple[str, Value] | None = None

    async def get(self, key: str, fetch: Callable[[], Awaitable[Value]]) -> Value:
        """Return the value of a key; calls `fetch` unless the call before was for the same key."""
        async with self._lock:
            if self._found is None or self._found[0] != key:
                self._found = key, await fetch()
            return self._found[1]


@dataclass(frozen=True, slots=True)
class ParityResult:
    """How a server's log-probabilities of known tokens compare with the trainer's at one version.

    Attributes:
        differences: between server and trainer.
        movement: what the last update changed in both; None if it was not measured before the update.
        alarm: why the server may have other weights than the trainer; empty if nothing points to it.
    """

    differences: LogprobDifferences
    movement: Movement | None
    alarm: str


class Parity:
    """Compares the log-probabilities of servers with the trainer's, which it fetches once for each version.

    Args:
        run: the run that the servers sample for.
        trainer: source of the expected log-probabilities.
    """

    def __init__(self, run: ServedRun, trainer: TrainerClient) -> None:
        self._run, self._trainer = run, trainer
        self._window = ParityWindow(_read_differences(run.folder))
        self._expected, self._sequences = Latest[list[list[float]]](), Latest[Sequence[np.ndarray]]()
        # Of the next version's sequences, by the weights before the update.
        self._trainer_before: tuple[str, list[list[float]]] = "", []
        self._servers_before: dict[VllmClient, tuple[str, list[np.ndarray]]] = {}

    async def sequences(self, version: PolicyVersion) -> Sequence[np.ndarray]:
        """Return [B] arrays [T] of the token ids on which servers are compared; read once for each version."""
        return await self._sequences.get(str(version), lambda: self._choose(version.version))

    async def expect(self, version: PolicyVersion) -> list[list[float]]:
        """Return the trainer's raw log-probabilities of the tokens of `sequences`: [B][T-1], in nats.

        Fetched once for each version; the trainer must be at that version then.
        """

        async def fetch() -> list[list[float]]:
            sequences = [each.tolist() for each in await self.sequences(version)]
            return await self._trainer.logprobs(sequences) if sequences else []

        return await self._expected.get(str(version), fetch)

    async def note_trainer_before(self, version: PolicyVersion) -> None:
        """Have the trainer score the sequences of `version` before it trains to that version.

        Raises:
            ServiceDiedError: the trainer is gone.
        """
        sequences = [each.tolist() for each in await self.sequences(version)]
        # Without these scores servers are compared by their differences alone.
        with suppress(RequestError):
            self._trainer_before = str(version), await self._trainer.logprobs(sequences) if sequences else []

    async def note_server_before(self, server: VllmClient, version: PolicyVersion) -> None:
        """Have a server score the sequences of `version` with the weights before; one that fails is compared without it."""
        sequences, limit_s = await self.sequences(version), self._run.config.sync.timeout_s
        with suppress(SyncError):
            async with name_errors(server, "scoring with its weights", limit_s):
                scored = await score_by_server(server, sequences, limit_s)
                self._servers_before[server] = str(version), scored

    async def compare(self, server: VllmClient, version: PolicyVersion, *, is_exact: bool) -> ParityResult:
        """Compare a server's log-probabilities with the trainer's; `is_exact`: they compute in single precision on CPUs.

        Raises:
            SyncError: they were not measured in time.
        """
        sequences = await self.sequences(version)
        # The first token of a sequence has no log-probability.
        if all(len(each) < 2 for each in sequences):
            return ParityResult(NOT_COMPARED, None, "")
        expected, found = await fetch_logprobs(
            self.expect(version),
            server,
            sequences,
            str(version),
            timeout_s=self._run.config.sync.timeout_s,
        )
        differences = LogprobDifferences.measure(expected, found)
        movement = self._measure_movement(server, version, expected, found)
        alarm = self._window.find_excess(differences, is_exact=is_exact)
        if movement and movement.is_stale:
            alarm = (
                f"the update moved its log-probabilities {movement.slope:.2g} times as far as the trainer's, and "
                f"{movement.expected:.2g} is expected: it computes with old weights"
            )
        return ParityResult(differences, movement, alarm)

    def check_start(self, server: VllmClient, result: ParityResult) -> None:
        """Refuse a server that computes another function of the start model than the trainer.

        Later syncs are compared with the first ones, so this difference would never be found again. The mean alone decides: a healthy
        mixture of experts may route a few tokens otherwise.

        Raises:
            ConfigError: names the difference in nats.
        """
        if result.differences is not NOT_COMPARED and (
            excess := find_excess(result.differences, replace(START_LIMITS, high=math.inf))
        ):
            remedy = (
                f"{excess}. Both have the start model's weights, so the server computes another function of them: a rope, "
                "soft cap, quantization or head that serve.extra_args or the model's config.json sets for one of the two alone. If that is "
                "meant, set sync.parity_sequences=0, and correct the difference with train.importance or train.old_logprobs"
            )
            raise ConfigError("serve", server.url, remedy)

    def accept(self, result: ParityResult) -> None:
        """Count the differences of a server with correct weights among those that later syncs are compared with."""
        self._window.accept(result.differences)

    def _measure_movement(
        self, server: VllmClient, version: PolicyVersion, expected: Logprobs, found: Logprobs
    ) -> Movement | None:
        (trainer_name, before), (name, server_before) = (
            self._trainer_before,
            self._servers_before.pop(server, ("", [])),
        )
        if not trainer_name == name == str(version):
            return None
        return Movement.measure((before, expected), (server_before, found))

    async def _choose(self, version: int) -> Sequence[np.ndarray]:
        """Return token ids of sequences of the last trained batch, or of the first prompts if there is none."""
        n = self._run.config.sync.parity_sequences
        if version and (
            found := await asyncio.to_thread(read_batch_sequences, self._run.folder, version - 1, n)
        ):
            return found
        return [opening.token_ids for opening in await self._run.openings.first(n)]


def _read_differences(folder: RunFolder) -> list[LogprobDifferences]:
    """Read the differences of a run's earlier syncs, the oldest first, so that a resumed run accepts what it did before."""
    stored = scan(folder, "metrics").filter(pl.col("name").is_in([DIFFERENCE_MEAN, DIFFERENCE_HIGH]))
    rows = stored.select("step", "name", "value").collect()
    by_step = rows.pivot("name", index="step", values="value", aggregate_function="last").sort("step")
    if not {DIFFERENCE_MEAN, DIFFERENCE_HIGH} <= set(by_step.columns):
        return []
    pairs = by_step.select(DIFFERENCE_MEAN, DIFFERENCE_HIGH).tail(WINDOW).iter_rows()
    return [LogprobDifferences(mean, high) for mean, high in pairs]
