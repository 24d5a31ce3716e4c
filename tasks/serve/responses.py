"""Decodes vLLM's responses into arrays; typed, so that no Python object is created for fields that are not used.

A generation is vLLM's own JSON, or the arrays of our vLLM plugin (tasks/sync/vllm_plugin/server_routes.py).
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import pybase64

from rollmill.tasks.serve.http_connection import Body

ARRAYS = "application/vnd.rollmill.arrays"
"""Media type of a generation as arrays; a server without the plugin responds with JSON."""

# The header of a .npy file of a few axes ends before this.
NPY_HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as arrays: tokens, log-probabilities and the versions that sampled them.

    Attributes:
        token_ids: [T] int32, an end-of-sequence token included.
        logprobs: [T] float32, nats, of the tokens as sampled.
        finish_reason: stop | length | abort.
        version_spans: (index into token_ids, name of the weights) at the start of each span of one version.
        routed_experts: [N, layers, experts per token] of prompt and completion, from the requested token to the last but
            one: the last was sampled and not computed. None: the server returned none.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    version_spans: tuple[tuple[int, str], ...]
    routed_experts: np.ndarray | None = None


# A response has one for each token: the garbage collector need not visit them.
class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _GenerateChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_VersionSpan] | None = None
    # Not str, which would be a copy of megabytes of base64 before they are decoded.
    routed_experts: msgspec.Raw = msgspec.Raw(b"null")


class _GenerateResponse(msgspec.Struct):
    choices: list[_GenerateChoice]
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _ArraysResponse(msgspec.Struct):
    token_ids: memoryview
    logprobs: memoryview
    finish_reason: str | None
    weight_versions: list[_VersionSpan]
    routed_experts: memoryview | None = None
    routed_shape: tuple[int, ...] = ()
    routed_dtype: str = ""


class WeightInfo(msgspec.Struct):
    """Response of /weight_info: the name of the weights."""

    weight_version: str | None


class _Model(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    """Response of /v1/models."""

    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class Tokenized(msgspec.Struct):
    """Response of /tokenize."""

    tokens: list[int]


class Detokenized(msgspec.Struct):
    """Response of /detokenize: the text."""

    prompt: str


_decode = msgspec.json.Decoder(_GenerateResponse).decode
_decode_arrays = msgspec.msgpack.Decoder(_ArraysResponse).decode


def decode_completion(body: Body) -> Completion:
    """Decode the first choice of a response of /inference/v1/generate into arrays.

    The arrays of a response from the plugin are views of its body. Of a JSON response, only the routed experts are a view, of the
    decoded base64.

    Raises:
        msgspec.DecodeError, LookupError, ValueError: the body has another form, or lacks log-probabilities.
    """
    # MessagePack of an object never begins with this byte.
    completion = _completion_from_json(body) if body[:1] == b"{" else _completion_from_arrays(body)
    n_tokens, n_logprobs = len(completion.token_ids), len(completion.logprobs)
    if n_tokens != n_logprobs:
        raise LookupError(f"{n_tokens} tokens came with {n_logprobs} log-probabilities")
    return completion


def _completion_from_json(body: Body) -> Completion:
    choice = _decode(body).choices[0]
    token_ids, logprobs = choice.token_ids or [], choice.logprobs
    content = logprobs.content if logprobs is not None and logprobs.content is not None else []
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.fromiter((each.logprob for each in content), np.float32, len(content)),
        finish_reason=choice.finish_reason or "abort",
        version_spans=tuple((span.start, span.version) for span in choice.weight_versions or ()),
        routed_experts=_decode_npy(memoryview(choice.routed_experts)),
    )


def _completion_from_arrays(body: Body) -> Completion:
    answer = _decode_arrays(body)
    experts = answer.routed_experts
    return Completion(
        token_ids=np.frombuffer(answer.token_ids, "<i4"),
        logprobs=np.frombuffer(answer.logprobs, "<f4"),
        finish_reason=answer.finish_reason or "abort",
        version_spans=tuple((span.start, span.version) for span in answer.weight_versions),
        routed_experts=None
        if experts is None
        else np.frombuffer(experts, answer.routed_dtype).reshape(answer.routed_shape),
    )


def _decode_npy(text: memoryview) -> np.ndarray | None:
    """Decode a JSON string with the base64 of a .npy file to an array, a view of the decoded bytes; None for null."""
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


def prompt_logprobs_reader(token_ids: np.ndarray) -> Callable[[Body], np.ndarray]:
    """Return a function that reads [T-1] float32 log-probabilities, nats, of the prompt `token_ids` ([T]) from a response."""

    def read(body: Body) -> np.ndarray:
        by_position = _decode(body).prompt_logprobs or []
        pairs = zip(token_ids[1:].tolist(), by_position[1:], strict=True)
        each = (position[str(token)].logprob for token, position in pairs if position is not None)
        return np.fromiter(each, np.float32, len(token_ids) - 1)

    return read
