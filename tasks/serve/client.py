"""Talks to one vLLM server: token ids in and out, and the control routes of a weight update."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from tasks.errors import RequestError, ServiceStartError
from tasks.serve.answers import Completion, completion_of, prompt_logprobs_of
from tasks.serve.config import ServeConfig
from tasks.serve.connection import Connection
from tasks.serve.process import LaunchedProcess

Answer = TypeVar("Answer")

HEALTH_PAUSE_S = 0.25


class VllmClient:
    """Client of one server; an async context manager.

    Every request raises TransientRequestError when it may succeed if sent again (no connection, a time-out,
    a busy or failing server), and RequestError when it would not.
    """

    def __init__(self, url: str, config: ServeConfig) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._connection = Connection(
            self.url,
            api_key=os.environ.get(config.api_key_env, ""),
            connect_timeout_s=config.connect_timeout_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def wait_until_healthy(self, timeout_s: float, process: LaunchedProcess | None = None) -> None:
        """Wait until the server answers /health; `process` is the one that was launched, for its log.

        Raises:
            ServiceStartError: it ended, or did not answer in time; with its last log lines.
        """
        deadline = time.monotonic() + timeout_s
        while not await self.is_healthy():
            tail = process.log_tail() if process else ""
            if process is not None and not process.is_running:
                reason = f"ended with status {process.returncode} while starting"
                raise ServiceStartError(f"vLLM server {self.url}", reason, tail)
            if time.monotonic() > deadline:
                reason = f"not healthy within serve.start_timeout_s = {timeout_s:g} s"
                raise ServiceStartError(f"vLLM server {self.url}", reason, tail)
            await asyncio.sleep(HEALTH_PAUSE_S)

    async def is_healthy(self) -> bool:
        """True when the server and its engine answer."""
        try:
            await self._call("GET", "/health")
        except RequestError:
            return False
        return True

    async def warm_up(self, process: LaunchedProcess | None = None) -> None:
        """Send the first request, which is slow, with everything that later ones ask for.

        Raises:
            ServiceStartError: it failed, as with a model that vLLM loads and cannot compute; with the last
                log lines.
        """
        tokens, timeout_s = np.zeros(2, np.int32), self._config.start_timeout_s
        try:
            await self.generate(tokens, max_tokens=2, temperature=1.0, seed=0, timeout_s=timeout_s)
            await self.prompt_logprobs(tokens, timeout_s)
        except RequestError as error:
            tail = process.log_tail() if process else ""
            reason = f"its first request failed: {error}"
            raise ServiceStartError(f"vLLM server {self.url}", reason, tail) from error

    async def generate(
        self,
        token_ids: np.ndarray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float,
    ) -> Completion:
        """One completion of `token_ids` ([T] int32), with the log-probabilities its tokens were sampled by.

        It ends at the model's end of sequence, and at any of `stop_token_ids`, that token included.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(stop_token_ids),
        }
        return await self._sample(token_ids, sampling, completion_of, timeout_s)

    async def prompt_logprobs(self, token_ids: np.ndarray, timeout_s: float | None = None) -> np.ndarray:
        """[T-1] float32, nats: log p(token i+1 | tokens 0..i), never divided by a temperature."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        wait_s = timeout_s or self._config.request_timeout_s
        return await self._sample(token_ids, sampling, prompt_logprobs_of(token_ids), wait_s)

    async def version(self) -> str:
        """The name of the weights that the server has."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    async def set_version(self, version: str) -> None:
        """Rename the weights that the server has, without sending any."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by the server's own tokenizer."""
        answer = await self._call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})
        return [int(token) for token in answer["tokens"]]

    async def tokenize_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that asks for the next message, by the server's own chat template."""
        body = {"messages": list(messages), "add_generation_prompt": True, "add_special_tokens": False}
        return [int(token) for token in (await self._call("POST", "/tokenize", body))["tokens"]]

    async def pause(self, timeout_s: float) -> None:
        """Freeze requests; they go on at `resume`, with a recomputed cache."""
        await self._call("POST", "/pause?mode=keep&clear_cache=true", None, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        """Go on with frozen requests."""
        await self._call("POST", "/resume", None, timeout_s)

    async def init_weight_transfer(self, info: dict[str, Any], timeout_s: float) -> None:
        """Have the server join the sender of the weights; returns when it has."""
        await self._call("POST", "/init_weight_transfer_engine", {"init_info": info}, timeout_s)

    async def start_weight_update(self, timeout_s: float) -> None:
        """Open the live model for new weights; from here on it cannot decode until `finish_weight_update`."""
        await self._call("POST", "/start_weight_update", None, timeout_s)

    async def update_weights(self, plan: dict[str, Any], timeout_s: float) -> None:
        """Receive weights by plan; returns when they have arrived."""
        await self._call("POST", "/update_weights", {"update_info": plan}, timeout_s)

    async def finish_weight_update(self, version: str, timeout_s: float) -> None:
        """Put the new weights in place, under a new name."""
        await self._call("POST", "/finish_weight_update", {"weight_version": version}, timeout_s)

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Forget the cache, which old weights made."""
        await self._call("POST", "/reset_prefix_cache", None, timeout_s)

    async def _sample(
        self,
        token_ids: np.ndarray,
        sampling: dict[str, Any],
        read: Callable[[bytes], Answer],
        timeout_s: float,
    ) -> Answer:
        """Send a generation request; the answer is decoded off the event loop."""
        body = msgspec.json.encode({"token_ids": token_ids.tolist(), "sampling_params": sampling})
        content = await self._connection.send("POST", "/inference/v1/generate", body, timeout_s)
        try:
            return await asyncio.to_thread(read, content)
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise RequestError(f"{self.url}: cannot read its answer: {error}") from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The decoded answer of a control route; None when it has no body."""
        content = msgspec.json.encode(body) if body is not None else b""
        wait_s = timeout_s or self._config.connect_timeout_s
        answer = await self._connection.send(method, path, content, wait_s)
        return msgspec.json.decode(answer) if answer else None
