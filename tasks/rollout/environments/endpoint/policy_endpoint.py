"""HTTP endpoint of the policy, as programs that others wrote know it: OpenAI's chat completions and responses, Anthropic's messages."""

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

import msgspec
from aiohttp import web

from rollmill.tasks.errors import EpisodeError
from rollmill.tasks.rollout.environments.endpoint import anthropic_wire, chat_wire, responses_wire
from rollmill.tasks.rollout.environments.endpoint.chat_wire import MODEL, Said, Wire

Ask = Callable[[Wire], Awaitable[Said]]
"""Returns the policy's next message for a chat request; raises EpisodeError to refuse it."""

# Seconds in which requests of a client that is still connected may end.
SHUTDOWN_TIMEOUT_S = 0.5


class PolicyEndpoint:
    """Server of the policy, which passes each request to the function in `asked` for the episode that it names.

    An episode is named by the header X-Session-ID, or by the API key.

    Args:
        host: address that it listens on.
        max_bytes: of a request; a longer one is refused.

    Attributes:
        asked: function that answers the requests of an episode, by the episode's name.
        url: address without a path, such as http://127.0.0.1:41234, while it is entered.
        refusal: why it refused a request last; empty if it refused none.
    """

    def __init__(self, host: str = "127.0.0.1", max_bytes: int = 1 << 30) -> None:
        self.asked: dict[str, Ask] = {}
        self.url = self.refusal = ""
        self._host, self._max_bytes = host, max_bytes
        # Conversation up to each response of the responses API, without instructions.
        self._responses: dict[str, list[Wire]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=self._max_bytes)
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/responses", self._respond),
                web.post("/v1/messages", self._message),
                web.get("/v1/models", self._list_models),
            ]
        )
        runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self._host, 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body, ask = await self._read(request)
            said = await ask(chat_wire.check_request(body))
            completion = chat_wire.chat_completion(said, chat_wire.new_id("chatcmpl"))
        except EpisodeError as error:
            return self._refuse(error, {"error": {"message": str(error), "type": "invalid_request_error"}})
        events = partial(chat_wire.completion_events, with_usage=chat_wire.has_usage(body))
        return _answer(body, completion, events)

    async def _respond(self, request: web.Request) -> web.Response:
        try:
            body, ask = await self._read(request)
            responses_wire.check_request(body)
            before = self._find_response(body)
            said = await ask(chat_wire.check_request(responses_wire.chat_request(body, before)))
            response = responses_wire.response(responses_wire.output_items(said.message), said.counts, body)
            self._responses[response["id"]] = [
                *before,
                *responses_wire.input_messages(body["input"]),
                said.message,
            ]
        except EpisodeError as error:
            return self._refuse(error, {"error": {"message": str(error), "type": "invalid_request_error"}})
        return _answer(body, response, responses_wire.response_events)

    def _find_response(self, body: Wire) -> list[Wire]:
        """Return the conversation of the response that a request continues; empty if it continues none."""
        if not (name := body.get("previous_response_id")):
            return []
        if name not in self._responses:
            raise EpisodeError(f"no response {name!r:.100} was given in this episode")
        return self._responses[name]

    async def _message(self, request: web.Request) -> web.Response:
        try:
            body, ask = await self._read(request)
            said = await ask(chat_wire.check_request(anthropic_wire.chat_request(body)))
            message = anthropic_wire.message(said)
        except EpisodeError as error:
            return self._refuse(
                error, {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}}
            )
        return _answer(body, message, anthropic_wire.message_events)

    async def _list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def _refuse(self, error: EpisodeError, body: Mapping[str, object]) -> web.Response:
        self.refusal = str(error)
        return web.json_response(body, status=400)

    async def _read(self, request: web.Request) -> tuple[dict[str, Any], Ask]:
        """Return the body of a request, and the function that answers it.

        Raises:
            EpisodeError: it names no open episode, or is no JSON object.
        """
        ask = next((self.asked[each] for each in _list_names(request.headers) if each in self.asked), None)
        if ask is None:
            raise EpisodeError(
                "no episode is open for this API key: use the one that the program was started with"
            )
        try:
            return msgspec.json.decode(await request.read(), type=dict[str, Any]), ask
        except web.HTTPRequestEntityTooLarge as error:
            raise EpisodeError(f"the request has more than {self._max_bytes} bytes") from error
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise EpisodeError(f"the request is no JSON object: {error}") from error


def _list_names(headers: Mapping[str, str]) -> list[str]:
    """List what may name the episode of a request; a client may send the id of another session too."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    return [headers.get("X-Session-ID", ""), headers.get("x-api-key", ""), key]


def _answer(body: Wire, answer: Wire, write_events: Callable[[Wire], bytes]) -> web.Response:
    """Return an answer as JSON, or as server-sent events if the request asks for a stream."""
    if body.get("stream"):
        return web.Response(body=write_events(answer), content_type="text/event-stream")
    return web.Response(body=json.dumps(answer).encode(), content_type="application/json")
