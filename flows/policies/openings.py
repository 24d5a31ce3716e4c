"""The first prompts of an environment, on which servers are checked; problems that fail are passed over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import numpy as np

from flows.ui.progress import say
from tasks.errors import EpisodeError, EpisodeTimeoutError, ServiceError
from tasks.rollout.environment import Environment, Episode, Message
from tasks.rollout.foreign import checked_example, checked_messages, described, foreign_code
from tasks.rollout.tokens import ChatTokenizer

MAX_PASSED_OVER = 16
"""Problems that may fail before it is the environment that fails."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What an environment says at the beginning of an episode.

    Attributes:
        token_ids: [T] int32, the messages as the policy reads them.
    """

    messages: tuple[Message, ...]
    token_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Openings:
    """Openings of the training problems.

    Attributes:
        max_tokens: an opening is shorter than this.
        timeout_s: seconds that the environment has for a problem, for its opening, and to close the episode.
    """

    environment: Environment
    tokenizer: ChatTokenizer
    max_tokens: int
    timeout_s: float

    async def first(self, n: int) -> Sequence[Opening]:
        """The first `n` openings; fewer, but one, when the split has no more or too many problems fail.

        Raises:
            EpisodeError: the first MAX_PASSED_OVER problems and one more failed, or all there are.
            ServiceError: the environment's worker processes cannot be brought back.
        """
        found: list[Opening] = []
        failed: list[EpisodeError] = []
        for index in range(self.environment.size("train")):
            if len(found) == n or len(failed) > MAX_PASSED_OVER:
                break
            try:
                found.append(await self._of(index))
            except EpisodeError as error:
                failed.append(error)
                say(f"{error}; servers are not checked on it")
        if failed and not found:
            raise failed[-1]
        return found

    async def _of(self, index: int) -> Opening:
        """The opening of one problem; whatever fails of it is an EpisodeError that says where."""
        try:
            return await self._opened(index)
        except ServiceError:
            raise
        except Exception as error:
            where = f"environment {self.environment.name}: the opening of training problem {index} failed"
            raise EpisodeError(f"{where}: {': '.join(described(error))}") from error

    async def _opened(self, index: int) -> Opening:
        async with self._limited("answer"):
            problem = checked_example(await self.environment.example("train", index))
        with foreign_code():
            episode = self.environment.episode(problem, seed=0)
        try:
            async with self._limited("answer"):
                messages = checked_messages(await episode.reply(()))
        except BaseException:
            with suppress(Exception):  # the first error is told
                await self._close(episode)
            raise
        await self._close(episode)
        token_ids = self.tokenizer.encode(messages)
        if len(token_ids) >= self.max_tokens:
            raise EpisodeError(
                f"it has {len(token_ids)} tokens, and serve.max_model_len is {self.max_tokens}"
            )
        return Opening(messages, token_ids)

    async def _close(self, episode: Episode) -> None:
        async with self._limited("close its episode"):
            await episode.close()

    @asynccontextmanager
    async def _limited(self, what: str) -> AsyncIterator[None]:
        """A call of foreign code; EpisodeTimeoutError when its time is over."""
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                with foreign_code():
                    yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"it did not {what} within rollout.env_timeout_s = {self.timeout_s:g} s"
            raise EpisodeTimeoutError(text) from error
