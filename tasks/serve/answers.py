"""What vLLM answers, decoded into arrays; typed, so that no Python object is made of what nobody reads."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion.

    Attributes:
        token_ids: [T] int32, an end-of-sequence token included.
        logprobs: [T] float32, nats, of the tokens as sampled.
        finish_reason: stop | length | abort.
        version_spans: (index into token_ids, name of the weights) where each span of one version begins.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    version_spans: tuple[tuple[int, str], ...]


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


def completion_of(body: bytes) -> Completion:
    """The first choice of a /inference/v1/generate answer, with log-probabilities.

    Raises:
        msgspec.DecodeError, LookupError: it has not the form of one, or lacks the log-probabilities.
    """
    choice = _decode(body).choices[0]
    token_ids, logprobs = choice.token_ids or [], choice.logprobs
    content = logprobs.content if logprobs is not None and logprobs.content is not None else []
    if len(content) != len(token_ids):
        raise LookupError(f"{len(token_ids)} tokens came with {len(content)} log-probabilities")
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.fromiter((each.logprob for each in content), np.float32, len(content)),
        finish_reason=choice.finish_reason or "abort",
        version_spans=tuple((span.start, span.version) for span in choice.weight_versions or ()),
    )


def prompt_logprobs_of(token_ids: np.ndarray) -> Callable[[bytes], np.ndarray]:
    """Reads [T-1] float32 log-probabilities of the prompt `token_ids` ([T]) out of an answer."""

    def read(body: bytes) -> np.ndarray:
        by_position = _decode(body).prompt_logprobs or []
        pairs = zip(token_ids[1:].tolist(), by_position[1:], strict=True)
        each = (position[str(token)].logprob for token, position in pairs if position is not None)
        return np.fromiter(each, np.float32, len(token_ids) - 1)

    return read
