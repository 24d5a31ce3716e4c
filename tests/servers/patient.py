"""Requests that wait for an answer as long as a busy machine takes for it; httpx gives up after five seconds."""

import time
from functools import partial
from http import HTTPStatus
from typing import Any

import httpx

LONGEST_ANSWER_S = 120.0


def request(method: str, url: str, **sent: Any) -> httpx.Response:
    """An answer; Prefect's server says that it is not available while its database is busy, and is asked again then."""
    deadline = time.monotonic() + LONGEST_ANSWER_S
    while True:
        answer = httpx.request(method, url, timeout=LONGEST_ANSWER_S, **sent)
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            return answer
        time.sleep(0.5)


get = partial(request, "GET")
post = partial(request, "POST")
