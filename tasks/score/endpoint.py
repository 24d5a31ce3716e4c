"""A model behind HTTP that takes and gives JSON; what may succeed when sent again is."""

import json
import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tasks.errors import ConfigError, ScoreError, TransientRequestError
from tasks.observe.retries import retries
from tasks.score.config import EndpointConfig
from tasks.serve.connection import Connection

Answer = TypeVar("Answer")
SHOWN_CHARACTERS = 300


class Endpoint:
    """Requests to one URL.

    Args:
        field: the settings' name, for errors: score.judge, score.reward_model.
        url: base of the URL.
        config: limits and the name of the key's environment variable.

    Raises:
        ConfigError: the URL is none, or the key's environment variable is not set.
    """

    def __init__(self, field: str, url: str, config: EndpointConfig) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{field}.url", url, "give the base URL of the server: http://... or https://..."
            )
        api_key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        if config.api_key_env and not api_key:
            remedy = "set this environment variable to the API key, or leave api_key_env empty for none"
            raise ConfigError(f"{field}.api_key_env", config.api_key_env, remedy)
        self._config = config
        self._connection = Connection(
            url.rstrip("/"), api_key=api_key, connect_timeout_s=config.connect_timeout_s
        )

    async def ask(self, path: str, request: Mapping[str, object], kind: type[Answer]) -> Answer:
        """The answer to one request.

        Raises:
            RequestError: it failed for good, TransientRequestError: `max_attempts` times.
            ScoreError: the answer has not the shape of `kind`.
        """
        sends = retries(
            TransientRequestError,
            attempts=self._config.max_attempts,
            backoff_s=self._config.retry_backoff_s,
            longest_s=self._config.timeout_s,
        )
        content, body = json.dumps(request).encode(), b""
        async for send in sends:
            with send:
                body = bytes(await self._connection.send("POST", path, content, self._config.timeout_s))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            shown = body[:SHOWN_CHARACTERS].decode(errors="replace")
            raise ScoreError(f"{path} gave an answer of another shape ({error}): {shown}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()
