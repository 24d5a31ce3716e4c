"""What vLLM answers, decoded into arrays; typed, so that no Python object is made of what nobody reads.

A generation comes as vLLM's own JSON, or as the arrays that our plugin for vLLM answers with (tasks/sync/endpoint.py).
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pybase64

from tasks.serve.connection import Body

ARRAYS = "application/vnd.rollmill.arrays"
"""Media type of a generation as arrays; a server without the plugin answers with JSON all the same."""

NPY_HEAD_BYTES = 256
"""The header of a .npy file of a few axes ends before this."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion.

    Attributes:
        token_ids: [T] int32, an end-of-sequence token included.
        logprobs: [T] float32, nats, of the tokens as sampled.
        finish_reason: stop | length | abort.
        version_spans: (index into token_ids, name of the weights) where each span of one version begins.
        routed_experts: [N, layers, experts a token], of prompt and completion from the token that was asked for to
            the last but one: the last has been sampled, not computed. None: the server gave none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    version_spans: tuple[tuple[int, str], ...]
    routed_experts: np.ndarray | None = None


class _Logprob(msgspec.Struct, gc=False):
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
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Arrays(msgspec.Struct):
    token_ids: memoryview
    logprobs: memoryview
    finish_reason: str | None
    weight_versions: list[_Span]
    routed_experts: memoryview | None = None
    routed_shape: tuple[int, ...] = ()
    routed_dtype: str = ""


_decode = msgspec.json.Decoder(_Answer).decode
_decode_arrays = msgspec.msgpack.Decoder(_Arrays).decode


def completion_of(body: Body) -> Completion:
    """The first choice of a /inference/v1/generate answer, with log-probabilities.

    Arrays are views on the body, or on what of it was in base64.

    Raises:
        msgspec.DecodeError, LookupError, ValueError: it has not the form of one, or lacks the log-probabilities.
    """
    return _from_json(body) if body[:1] == b"{" else _from_arrays(body)


def _from_json(body: Body) -> Completion:
    choice = _decode(body).choices[0]
    token_ids, logprobs = choice.token_ids or [], choice.logprobs
    content = logprobs.content if logprobs is not None and logprobs.content is not None else []
    _check_length(len(token_ids), len(content))
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.fromiter((each.logprob for each in content), np.float32, len(content)),
        finish_reason=choice.finish_reason or "abort",
        version_spans=_spans(choice.weight_versions or []),
        routed_experts=_npy(memoryview(choice.routed_experts)),
    )


def _from_arrays(body: Body) -> Completion:
    answer = _decode_arrays(body)
    token_ids, logprobs = np.frombuffer(answer.token_ids, "<i4"), np.frombuffer(answer.logprobs, "<f4")
    _check_length(len(token_ids), len(logprobs))
    experts = answer.routed_experts
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=answer.finish_reason or "abort",
        version_spans=_spans(answer.weight_versions),
        routed_experts=None
        if experts is None
        else np.frombuffer(experts, answer.routed_dtype).reshape(answer.routed_shape),
    )


def _check_length(n_tokens: int, n_logprobs: int) -> None:
    if n_tokens != n_logprobs:
        raise LookupError(f"{n_tokens} tokens came with {n_logprobs} log-probabilities")


def _spans(spans: list[_Span]) -> tuple[tuple[int, str], ...]:
    return tuple((span.start, span.version) for span in spans)


def _npy(text: memoryview) -> np.ndarray | None:
    """The array of a JSON string with the base64 of a .npy file, as a view on the decoded bytes; None for null."""
    if bytes(text[:1]) != b'"':
        return None
    file = pybase64.b64decode_as_bytearray(text[1:-1], validate=True)
    head = io.BytesIO(file[:NPY_HEAD_BYTES])
    version = np.lib.format.read_magic(head)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran_order, dtype = read(head)
    return np.frombuffer(file, dtype, offset=head.tell()).reshape(
        shape, order="F" if is_fortran_order else "C"
    )


def prompt_logprobs_of(token_ids: np.ndarray) -> Callable[[Body], np.ndarray]:
    """Reads [T-1] float32 log-probabilities of the prompt `token_ids` ([T]) out of an answer."""

    def read(body: Body) -> np.ndarray:
        by_position = _decode(body).prompt_logprobs or []
        pairs = zip(token_ids[1:].tolist(), by_position[1:], strict=True)
        each = (position[str(token)].logprob for token, position in pairs if position is not None)
        return np.fromiter(each, np.float32, len(token_ids) - 1)

    return read
