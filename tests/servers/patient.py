"""Requests that wait for an answer as long as a busy machine takes for it; httpx gives up after five seconds."""

from functools import partial

import httpx

LONGEST_ANSWER_S = 120.0

get = partial(httpx.get, timeout=LONGEST_ANSWER_S)
post = partial(httpx.post, timeout=LONGEST_ANSWER_S)
