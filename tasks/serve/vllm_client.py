"""Client of one vLLM server: generation from token ids to token ids, and the control routes of a weight update."""

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollmill.tasks.errors import ConfigError, RequestError, ServiceStartError, TransientRequestError
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.processes.launched_process import LaunchedProcess
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.http_connection import Body, ServiceClient, wait_for_start
from rollmill.tasks.serve.responses import (
    ARRAYS,
    Completion,
    Detokenized,
    Models,
    Tokenized,
    WeightInfo,
    decode_completion,
    prompt_logprobs_reader,
)
from rollmill.tasks.serve.vllm_launch import API_KEY_ENV, PLUGIN_REMEDY, ROUTING_ARGUMENT, has_plugin_failure

Answer = TypeVar("Answer")

# An answer of less (32 KiB) is decoded at once, which takes a fraction of a millisecond; larger ones in a thread.
SMALL_BYTES = 1 << 15
LOG_LINES = 1000
"""Of a starting server's log that are searched for the plugin's failure."""
# A request that is aborted just after it was sent may be known to the server only after the first abort.
ABORT_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Time limits and retries of a client of one server.

    Attributes:
        connect_timeout_s: seconds to open a connection, and for a control call.
        control_attempts: sends of a control call that may be repeated, the first one included.
        control_backoff_s: seconds before the second send; doubled each time, with jitter.
        abort_grace_s: seconds in which the server must return the tokens of an aborted request.
        probe_timeout_s: seconds in which a suspect server must sample one token.
        max_failures_in_a_row: failed requests in a row after which the server is suspect.
        decode_threads: threads that decode large answers.
    """

    connect_timeout_s: float = 10.0
    control_attempts: int = 4
    control_backoff_s: float = 0.2
    abort_grace_s: float = 2.0
    probe_timeout_s: float = 30.0
    max_failures_in_a_row: int = 5
    # Two leave cores to the event loop.
    decode_threads: int = 2


PATIENCE = ClientLimits()


class VllmClient(ServiceClient):
    """Client of one vLLM server; an async context manager.

    Every request raises TransientRequestError if another attempt may succeed (no connection, a time-out, a busy or failing
    server, an unreadable response), else RequestError. Control calls that may be repeated are retried before that; generation
    requests are not: see tasks/rollout/completions.py.

    Args:
        url: http://host:port of the server.
        config: settings of the servers.
        api_key: key of the server; None: read from the environment variable API_KEY_ENV; empty: none.
        limits: time limits and retries.

    Attributes:
        max_failures_in_a_row: see `ClientLimits`.
        api_key: sent with each request; empty: none.
    """

    def __init__(
        self, url: str, config: ServeConfig, api_key: str | None = None, limits: ClientLimits = PATIENCE
    ) -> None:
        self.max_failures_in_a_row = limits.max_failures_in_a_row
        self.api_key = os.environ.get(API_KEY_ENV, "") if api_key is None else api_key
        super().__init__(url, api_key=self.api_key, connect_timeout_s=limits.connect_timeout_s)
        self._config, self._limits = config, limits
        self._decoders = ThreadPoolExecutor(limits.decode_threads, thread_name_prefix="decode-answer")

    async def wait_until_healthy(self, timeout_s: float, process: LaunchedProcess | None = None) -> None:
        """Wait until the server answers /health; `process` is the launched one, whose log an error quotes.

        Raises:
            ServiceStartError: the server ended, did not load the plugin, or did not answer in time; with its last log lines.
        """
        name = f"vLLM server {self.url}"

        async def ask() -> bool | None:
            if await self.is_healthy():
                return True
            # After vLLM has logged that the plugin failed, it continues to start, for minutes.
            if process is not None and has_plugin_failure(process.log_tail(LOG_LINES)):
                raise ServiceStartError(name, PLUGIN_REMEDY, process.log_tail())
            return None

        await wait_for_start(name, ask, process, timeout_s, "start_timeout_s")

    async def is_healthy(self) -> bool:
        """Return True if the server and its engine answer."""
        try:
            # A gateway before the server may answer in words.
            await self._connection.send("GET", "/health", b"", self._limits.connect_timeout_s)
        except RequestError:
            return False
        return True

    async def can_sample(self) -> bool:
        """Return True if the server samples a token within ClientLimits.probe_timeout_s."""
        try:
            await self.generate(
                np.zeros(2, np.int32),
                max_tokens=1,
                temperature=1.0,
                seed=0,
                timeout_s=self._limits.probe_timeout_s,
            )
        except RequestError:
            return False
        return True

    async def warm_up(
        self,
        timeout_s: float,
        process: LaunchedProcess | None = None,
        *,
        needs_routing: bool = False,
        further: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Check that the plugin is loaded, and send the first, slow requests, with every feature that later ones use.

        Args:
            timeout_s: seconds for each of them.
            process: the launched process, whose log an error quotes.
            needs_routing: True if responses must have the routed experts.
            further: those of the run's later requests; see `generate`.

        Raises:
            ServiceStartError: it failed; some models load and cannot be computed.
            ConfigError: the server refuses `further`.
        """
        tokens = np.zeros(2, np.int32)
        try:
            await self._check_plugin()
            first = await self._again(
                lambda: self.generate(tokens, max_tokens=2, temperature=1.0, seed=0, timeout_s=timeout_s)
            )
            if needs_routing and first.routed_experts is None:
                raise RequestError(
                    f"it returned no routed experts, which rollout.keep_routing needs: start it with {ROUTING_ARGUMENT}"
                )
            await self.prompt_logprobs(tokens, timeout_s)
            if further:
                await self._try_sampling(tokens, further, timeout_s)
        except RequestError as error:
            tail = process.log_tail() if process else ""
            reason = f"its first request failed: {error}"
            raise ServiceStartError(f"vLLM server {self.url}", reason, tail) from error

    async def _try_sampling(
        self, token_ids: np.ndarray, further: Mapping[str, object], timeout_s: float
    ) -> None:
        """Sample two tokens with further fields of `SamplingParams`; ConfigError if the server refuses them."""
        try:
            await self._again(
                lambda: self.generate(
                    token_ids, max_tokens=2, temperature=1.0, seed=0, timeout_s=timeout_s, further=further
                )
            )
        except TransientRequestError:
            raise
        except RequestError as error:
            raise ConfigError("rollout.sampling", dict(further), f"vLLM refuses it: {error}") from error

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
        further: Mapping[str, object] = MappingProxyType({}),
    ) -> Completion:
        """Sample one completion of a prompt, with the log-probabilities of its tokens.

        Args:
            token_ids: [T] int32, the prompt.
            max_tokens: largest number of tokens of the completion.
            temperature: sampling temperature.
            seed: sampling seed.
            stop_token_ids: tokens that end the completion, besides the model's end of sequence; included in it.
            timeout_s: seconds until the request fails.
            until: moment of the event loop's clock at which the completion is aborted; its tokens so far are returned.
            routing_from: number of first tokens whose routed experts are left out.
            further: fields of vLLM's `SamplingParams`, which replace those above.

        Raises:
            TimeoutError: the server did not return the tokens of an aborted request within ClientLimits.abort_grace_s.
        """
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "detokenize": False,
            "stop_token_ids": list(stop_token_ids),
            **further,
        }
        if routing_from:
            sampling["routed_experts_prompt_start"] = routing_from
        # The client chooses the id, so that it can abort a request that has not answered yet.
        request_id = uuid.uuid4().hex
        body = _generate_body(token_ids, sampling, request_id)
        answer = asyncio.ensure_future(
            self._connection.send("POST", "/inference/v1/generate", body, timeout_s, ARRAYS)
        )
        try:
            return await self._decode(await self._abort_at(answer, request_id, until), decode_completion)
        finally:
            answer.cancel()

    async def prompt_logprobs(self, token_ids: np.ndarray, timeout_s: float | None = None) -> np.ndarray:
        """Compute log p(token i+1 | tokens 0..i) of the tokens of a prompt: [T-1] float32 in nats.

        They are never divided by a temperature.
        """
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        wait_s, read = timeout_s or self._config.request_timeout_s, prompt_logprobs_reader(token_ids)

        async def ask() -> np.ndarray:
            body = _generate_body(token_ids, sampling, uuid.uuid4().hex)
            answer = await self._connection.send("POST", "/inference/v1/generate", body, wait_s)
            return await self._decode(answer, read)

        return await self._again(ask)

    async def version(self) -> str:
        """Return the name of the weights that the server has."""
        return str((await self._ask(WeightInfo, "GET", "/weight_info")).weight_version)

    async def model(self) -> str:
        """Return the name of the served model; if that is a folder, its last part."""
        models = (await self._ask(Models, "GET", "/v1/models")).data
        return models[0].id.rstrip("/").rpartition("/")[2]

    async def set_version(self, version: str) -> None:
        """Change the name of the weights that the server has, without sending weights."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def sleep(self, timeout_s: float) -> None:
        """Have the server move its weights to host memory, and free its GPU's memory; requests under way are aborted."""
        await self._again(lambda: self._connection.send("POST", "/sleep?level=1", b"", timeout_s))

    async def wake(self, tag: str, timeout_s: float) -> None:
        """Have the server take memory of its GPU again, "weights" or "kv_cache"; with both it can sample."""
        await self._again(lambda: self._connection.send("POST", f"/wake_up?tags={tag}", b"", timeout_s))

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text from the server's tokenizer, without special tokens."""
        body = {"prompt": text, "add_special_tokens": False}
        return (await self._ask(Tokenized, "POST", "/tokenize", body)).tokens

    async def tokenize_chat(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """Return the token ids of a conversation and the header of the next message, by the server's chat template."""
        body = {"messages": list(messages), "add_generation_prompt": True, "add_special_tokens": False}
        # vLLM passes an empty list to templates, which then write about tools.
        offered = {"tools": list(tools)} if tools else {}
        return (await self._ask(Tokenized, "POST", "/tokenize", body | offered)).tokens

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids by the server's tokenizer, special tokens included."""
        return (await self._ask(Detokenized, "POST", "/detokenize", {"tokens": list(token_ids)})).prompt

    async def _check_plugin(self) -> None:
        """Raise RequestError with the remedy if the server lacks the plugin's routes."""
        try:
            await self.read_location()
        except TransientRequestError:
            raise
        except RequestError as error:
            raise RequestError(f"{PLUGIN_REMEDY} ({error})") from error

    async def read_location(self) -> Body:
        """Return where the server runs: JSON of a `ServerLocation` (tasks/sync/weight_messages.py)."""
        return await self._again(
            lambda: self._connection.send("GET", "/rollmill/weights", b"", self._limits.connect_timeout_s)
        )

    async def update_weights(self, request: bytes, timeout_s: float) -> Body:
        """Have the server replace its weights; returns when the new ones are in place and requests continue.

        Args:
            request: JSON of a `WeightUpdateRequest` (tasks/sync/weight_messages.py).
            timeout_s: seconds until the request fails.

        Returns:
            JSON of a `WeightUpdateResponse`.

        Raises:
            RequestError: the weights were not replaced; the text says whether the server still samples with the old ones.
        """
        return await self._connection.send("POST", "/rollmill/weights", request, timeout_s)

    async def _abort_at(self, sampled: asyncio.Future[Body], request_id: str, until: float | None) -> Body:
        """Return the response to a generation request; at `until`, abort the request and return its tokens so far.

        Args:
            sampled: the response.
            request_id: id of the request.
            until: time of the event loop's clock in seconds; None: never.

        Raises:
            TimeoutError: the server did not return the tokens within ClientLimits.abort_grace_s.
        """
        left_s = None if until is None else until - asyncio.get_running_loop().time()
        await asyncio.wait([sampled], timeout=left_s)
        if sampled.done():
            return sampled.result()
        # vLLM adds this prefix to the id of a request of /inference/v1/generate.
        names = {"request_ids": [f"generate-tokens-{request_id}"]}
        try:
            async with asyncio.timeout(self._limits.abort_grace_s):
                while not sampled.done():
                    await self._call("POST", "/inference/v1/abort_requests", names)
                    await asyncio.wait([sampled], timeout=ABORT_AGAIN_S)
                return sampled.result()
        except RequestError as error:
            raise TimeoutError(f"{self.url}: the aborted request returned nothing: {error}") from error

    async def _decode(self, content: Body, read: Callable[[Body], Answer]) -> Answer:
        """Decode the response to a generation request with `read`; a large response is decoded in a thread.

        Raises:
            TransientRequestError: the response cannot be read.
        """
        try:
            if len(content) < SMALL_BYTES:
                return read(content)
            return await asyncio.get_running_loop().run_in_executor(self._decoders, read, content)
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise TransientRequestError(f"{self.url}: cannot read its response: {error}") from error

    async def _ask(
        self, kind: type[Answer], method: str, path: str, body: dict[str, Any] | None = None
    ) -> Answer:
        """Send a control request and return its JSON response as `kind`; errors and repetition as of `_call`."""

        async def ask() -> Answer:
            answer = await self._once(method, path, body)
            return await self._decode(answer, partial(msgspec.json.decode, type=kind))

        return await self._again(ask)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Body:
        """Send a control request and return the body of its response.

        It is sent again after transient errors, so it must be repeatable.
        """
        return await self._again(lambda: self._once(method, path, body))

    async def _once(self, method: str, path: str, body: dict[str, Any] | None) -> Body:
        content = msgspec.json.encode(body) if body is not None else b""
        return await self._connection.send(method, path, content, self._limits.connect_timeout_s)

    async def _again(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Call `send` and return its result; after a transient error again, up to ClientLimits.control_attempts times in all."""
        sends = Retries(
            TransientRequestError,
            attempts=self._limits.control_attempts,
            backoff_s=self._limits.control_backoff_s,
            longest_s=self._limits.connect_timeout_s,
        )
        async for attempt in sends:
            with attempt:
                return await send()
        raise AssertionError("the last attempt raises")


def _generate_body(token_ids: np.ndarray, sampling: dict[str, Any], request_id: str) -> bytes:
    """Encode the JSON of a request to /inference/v1/generate."""
    request = {"request_id": request_id, "token_ids": token_ids.tolist(), "sampling_params": sampling}
    return msgspec.json.encode(request)
