"""Talks to one vLLM server: token ids in and out, and the control routes of a weight update."""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from tasks.errors import RequestError, ServiceStartError, TransientRequestError
from tasks.observe.retries import retries
from tasks.serve.answers import ARRAYS, Completion, completion_of, prompt_logprobs_of
from tasks.serve.config import ServeConfig
from tasks.serve.connection import Body, Connection
from tasks.serve.process import LaunchedProcess
from tasks.serve.vllm import ROUTING_ARGUMENT

Answer = TypeVar("Answer")

SMALL_BYTES = 1 << 15
"""An answer of less (32 KiB) is decoded at once, which takes a fraction of a millisecond; larger ones in a thread."""
HEALTH_PAUSE_S = 0.25
ABORT_AGAIN_S = 0.2
"""A request that is cut just after it was sent may be known to the server only after the first abort."""


class VllmClient:
    """Client of one server; an async context manager.

    Every request raises TransientRequestError when it may succeed if sent again (no connection, a time-out,
    a busy or failing server, an answer that is none), and RequestError when it would not. Control calls that may be repeated have been.

    Args:
        url: http://host:port of the server.
        config: settings of the servers.
        api_key: of the server; None: that in the environment variable that serve.api_key_env names, empty: none.

    Attributes:
        max_failures_in_a_row: after how many failed requests it is asked no more until it samples again.
        api_key: that its requests show; empty: none.
    """

    def __init__(self, url: str, config: ServeConfig, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.max_failures_in_a_row = config.max_failures_in_a_row
        self.api_key = os.environ.get(config.api_key_env, "") if api_key is None else api_key
        self._config = config
        self._connection = Connection(
            self.url,
            api_key=self.api_key,
            connect_timeout_s=config.connect_timeout_s,
        )
        self._decoders = ThreadPoolExecutor(config.decode_threads, thread_name_prefix="decode-answer")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections: requests under way fail; they open again at the next one."""
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
            await self._once("GET", "/health")
        except RequestError:
            return False
        return True

    async def can_sample(self) -> bool:
        """True when it samples a token within `serve.probe_timeout_s`."""
        try:
            await self.generate(
                np.zeros(2, np.int32),
                max_tokens=1,
                temperature=1.0,
                seed=0,
                timeout_s=self._config.probe_timeout_s,
            )
        except RequestError:
            return False
        return True

    async def warm_up(self, process: LaunchedProcess | None = None, *, needs_routing: bool = False) -> None:
        """Send the first request, which is slow, with everything that later ones ask for.

        Args:
            process: the one that was launched, for its log.
            needs_routing: True when answers must have the routed experts.

        Raises:
            ServiceStartError: it failed, as with a model that vLLM loads and cannot compute; with the last
                log lines.
        """
        tokens, timeout_s = np.zeros(2, np.int32), self._config.start_timeout_s
        try:
            first = await self._again(
                lambda: self.generate(tokens, max_tokens=2, temperature=1.0, seed=0, timeout_s=timeout_s)
            )
            if needs_routing and first.routed_experts is None:
                raise RequestError(
                    f"it returned no routed experts, which rollout.keep_routing needs: start it with {ROUTING_ARGUMENT}"
                )
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
        until: float | None = None,
        routing_from: int = 0,
    ) -> Completion:
        """One completion of `token_ids` ([T] int32), with the log-probabilities its tokens were sampled by.

        It ends at the model's end of sequence, and at any of `stop_token_ids`, that token included; and it is
        cut at `until`, a moment of the event loop's clock, when that is given: what was sampled by then comes back, with
        finish_reason abort. A server that returns routed experts leaves out those of the first `routing_from` tokens.

        Raises:
            TimeoutError: `until` has come, and the server did not return the tokens in serve.abort_grace_s.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(stop_token_ids),
        }
        if routing_from:
            sampling["routed_experts_prompt_start"] = routing_from
        request_id = uuid.uuid4().hex
        sampled = asyncio.ensure_future(
            self._sample(token_ids, sampling, completion_of, timeout_s, request_id, ARRAYS)
        )
        try:
            return await self._cut(sampled, request_id, until)
        finally:
            sampled.cancel()

    async def prompt_logprobs(self, token_ids: np.ndarray, timeout_s: float | None = None) -> np.ndarray:
        """[T-1] float32, nats: log p(token i+1 | tokens 0..i), never divided by a temperature."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        wait_s, read = timeout_s or self._config.request_timeout_s, prompt_logprobs_of(token_ids)
        return await self._again(lambda: self._sample(token_ids, sampling, read, wait_s, uuid.uuid4().hex))

    async def version(self) -> str:
        """The name of the weights that the server has."""
        return str((await self._call("GET", "/weight_info"))["weight_version"])

    async def model(self) -> str:
        """The name of the served model, a folder's without what is above it."""
        (first, *_) = (await self._call("GET", "/v1/models"))["data"]
        return str(first["id"]).rstrip("/").rpartition("/")[2]

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

    async def place(self) -> dict[str, Any]:
        """Where the server runs: a ServerPlace of tasks.sync.order as JSON."""
        return dict(await self._call("GET", "/rollmill/weights"))

    async def take_weights(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have the server take weights from the trainer; returns when they are in place and requests go on.

        Args:
            order: a WeightOrder of tasks.sync.order as JSON.
            timeout_s: seconds that may take.

        Returns:
            A WeightAnswer as JSON.

        Raises:
            RequestError: it did not; the text says whether the old weights still serve.
        """
        return dict(await self._once("POST", "/rollmill/weights", order, timeout_s))

    async def _cut(
        self, sampled: asyncio.Future[Completion], request_id: str, until: float | None
    ) -> Completion:
        """The answer; after `until` the server is asked to end it as it is."""
        left_s = None if until is None else until - asyncio.get_running_loop().time()
        await asyncio.wait([sampled], timeout=left_s)
        if sampled.done():
            return sampled.result()
        # vLLM's name for a request of /inference/v1/generate
        names = {"request_ids": [f"generate-tokens-{request_id}"]}
        try:
            async with asyncio.timeout(self._config.abort_grace_s):
                while not sampled.done():
                    await self._again(lambda: self._once("POST", "/inference/v1/abort_requests", names))
                    await asyncio.wait([sampled], timeout=ABORT_AGAIN_S)
                return sampled.result()
        except RequestError as error:
            raise TimeoutError(f"{self.url}: nothing came of a request that was cut: {error}") from error

    async def _sample(
        self,
        token_ids: np.ndarray,
        sampling: dict[str, Any],
        read: Callable[[Body], Answer],
        timeout_s: float,
        request_id: str,
        accept: str = "",
    ) -> Answer:
        """Send a generation request; a large answer is decoded off the event loop, few at a time."""
        request = {"request_id": request_id, "token_ids": token_ids.tolist(), "sampling_params": sampling}
        body = msgspec.json.encode(request)
        content = await self._connection.send("POST", "/inference/v1/generate", body, timeout_s, accept)
        try:
            if len(content) < SMALL_BYTES:
                return read(content)
            return await asyncio.get_running_loop().run_in_executor(self._decoders, read, content)
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise TransientRequestError(f"{self.url}: cannot read its answer: {error}") from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The decoded answer of a control route that may be called twice; None when it has no body."""
        return await self._again(lambda: self._once(method, path, body, timeout_s))

    async def _once(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """The decoded answer of a control route; None when it has no body."""
        content = msgspec.json.encode(body) if body is not None else b""
        wait_s = timeout_s or self._config.connect_timeout_s
        answer = await self._connection.send(method, path, content, wait_s)
        return msgspec.json.decode(answer) if answer else None

    async def _again(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """What a call gives that is sent again after transient errors."""
        sends = retries(
            TransientRequestError,
            attempts=self._config.control_attempts,
            backoff_s=self._config.control_backoff_s,
            longest_s=self._config.connect_timeout_s,
        )
        async for attempt in sends:
            with attempt:
                return await send()
        raise AssertionError("the last attempt raises")
