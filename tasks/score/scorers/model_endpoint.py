"""HTTP client of a model that takes and returns JSON, with retries."""

import json
import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from rollmill.tasks.errors import ConfigError, ScoreError, TransientRequestError
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.serve.http_connection import HttpConnection

Answer = TypeVar("Answer")
SHOWN_CHARACTERS = 300
# Sends of one request, the first one included.
ATTEMPTS = 4
# Seconds before the second send; doubled each time, with jitter.
BACKOFF_S = 0.5
# Longest request, as a share of score.timeout_s: one that hangs leaves time for another attempt.
REQUEST_SHARE = 0.5
# Seconds to open a connection; an endpoint that needs longer is overloaded.
CONNECT_TIMEOUT_S = 5.0


class Endpoint:
    """Client that sends JSON requests to the server of one model, with retries.

    Args:
        field: name of the settings for errors: score.judge, score.reward_model.
        url: base of the URL.
        api_key_env: name of the environment variable with the key; empty: no key.
        call_timeout_s: seconds of a whole call of the scorer, score.timeout_s.

    Raises:
        ConfigError: the URL is invalid, or the key's environment variable is not set.
    """

    def __init__(self, field: str, url: str, api_key_env: str, call_timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{field}.url", url, "give the base URL of the server: http://... or https://..."
            )
        api_key = os.environ.get(api_key_env, "") if api_key_env else ""
        if api_key_env and not api_key:
            remedy = "set this environment variable to the API key, or leave api_key_env empty for none"
            raise ConfigError(f"{field}.api_key_env", api_key_env, remedy)
        self._timeout_s = REQUEST_SHARE * call_timeout_s
        self._connection = HttpConnection(
            url.rstrip("/"), api_key=api_key, connect_timeout_s=CONNECT_TIMEOUT_S
        )

    async def ask(self, path: str, request: Mapping[str, object], kind: type[Answer]) -> Answer:
        """Send one request, again after transient errors, and return the decoded JSON response.

        Raises:
            RequestError: it failed permanently. TransientRequestError: every attempt failed.
            ScoreError: the answer does not have the shape of `kind`.
        """
        sends = Retries(
            TransientRequestError,
            attempts=ATTEMPTS,
            backoff_s=BACKOFF_S,
            longest_s=self._timeout_s,
        )
        # Encoded once for all attempts.
        content, body = json.dumps(request).encode(), b""
        async for send in sends:
            with send:
                body = bytes(await self._connection.send("POST", path, content, self._timeout_s))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            shown = body[:SHOWN_CHARACTERS].decode(errors="replace")
            raise ScoreError(f"{path} gave an answer of another shape ({error}): {shown}") from None

    async def close(self) -> None:
        """Close the HTTP connections to the server."""
        await self._connection.close()
