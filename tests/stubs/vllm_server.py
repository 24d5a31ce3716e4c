"""A vLLM server that sleeps: the routes that a run uses, each rollout of a given duration."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import safetensors
from fastapi import FastAPI, HTTPException, Request

from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import Message
from rollmill.tasks.serve.vllm_launch import LOGPROBS_MODE, TRANSFER_BACKEND
from rollmill.tasks.sync.weight_messages import ServerLocation, WeightUpdateRequest, WeightUpdateResponse
from rollmill.tasks.train.service.control_api import ControlServer
from tests.stubs.trainer import LOGPROB

MAX_MODEL_LEN = 1 << 20
LOOK_AGAIN_S = 0.02
ANSWERS = ("85", "")
"""Texts it answers with, in turn: one is in the environment's form and one is not, so that rewards are spread."""


class Asked(NamedTuple):
    """A completion that was asked for.

    Attributes:
        seed: of the sampler.
        version: the version of the weights that the server last received.
    """

    seed: int
    temperature: float
    version: str


@dataclass
class StubVllmServer:
    """A stub server of the model in `model`, of which only the tokenizer is read.

    What it answers is a function of the sampler's seed alone.

    Attributes:
        rollout_s: seconds of one completion.
        asked: every completion that it was asked for, in order.
        most: how many of those it answers for now, and holds the others back; None: all.
        events: what it was asked that its sleep concerns, in order: sleep, a tag that it wakes, update, version, score.
        answers: texts that it answers with, one of them for each seed.
        closing: what it answers to a prompt that has the seed's answer already; empty: the same again.
        scored: every prompt that it was asked for log-probabilities of, as token ids, in order.
        most_scored: how many of those it answers for now, and holds the others back; None: all.
    """

    model: Path
    rollout_s: float
    asked: list[Asked] = field(default_factory=list)
    most: int | None = None
    events: list[str] = field(default_factory=list)
    answers: Sequence[str] = ANSWERS
    closing: str = ""
    scored: list[Sequence[int]] = field(default_factory=list)
    most_scored: int | None = None
    _version: str = "start"

    def name(self, version: str) -> None:
        """Call its weights so."""
        self._version = version

    def serve(self, port: int) -> ControlServer:
        """Answer at a loopback port, on a thread."""
        app, tokenizer = FastAPI(), ChatTokenizer.load(self.model)
        answers = [tokenizer.encode_answer(answer).tolist() for answer in self.answers]
        closing = tokenizer.encode_answer(self.closing).tolist()

        @app.get("/health")
        async def health() -> None:
            return None

        @app.get("/weight_info")
        async def weight_info() -> dict[str, str]:
            return {"weight_version": self._version}

        @app.get("/server_info")
        async def server_info() -> dict[str, Any]:
            model = {"max_model_len": MAX_MODEL_LEN, "logprobs_mode": LOGPROBS_MODE}
            return {
                "vllm_config": {
                    "model_config": model,
                    "weight_transfer_config": {"backend": TRANSFER_BACKEND},
                }
            }

        @app.post("/tokenize")
        async def tokenize(body: dict[str, Any]) -> dict[str, list[int]]:
            return {"tokens": tokenizer.encode([Message("user", body["prompt"])]).tolist()}

        @app.post("/inference/v1/generate")
        async def generate(body: dict[str, Any]) -> dict[str, Any]:
            if "sampling_params" not in body:
                raise HTTPException(400, "sampling_params are missing")
            sampling = body["sampling_params"]
            if "prompt_logprobs" in sampling:
                return await self._score(body["token_ids"])
            version = self._version
            self.asked.append(Asked(sampling["seed"], sampling["temperature"], version))
            number = len(self.asked)
            await asyncio.sleep(self.rollout_s)
            while self.most is not None and number > self.most:  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(LOOK_AGAIN_S)
            chosen = sampling["seed"] % len(answers)
            if self.closing and self.answers[chosen] in tokenizer.decode(np.array(body["token_ids"])):
                return _completion(closing, version)
            return _completion(answers[chosen], version)

        self._add_model(app, tokenizer)
        self._add_weights(app)
        return ControlServer(app, "127.0.0.1", port)

    async def _score(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The log-probabilities of a prompt, once its turn has come."""
        self.events.append("score")
        self.scored.append(token_ids)
        number = len(self.scored)
        while self.most_scored is not None and number > self.most_scored:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(LOOK_AGAIN_S)
        return _prompt_logprobs(token_ids)

    def _add_model(self, app: FastAPI, tokenizer: ChatTokenizer) -> None:
        """The routes that say which model it serves, and what its tokens are."""

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"data": [{"id": str(self.model), "max_model_len": MAX_MODEL_LEN}]}

        @app.post("/detokenize")
        async def detokenize(body: dict[str, Any]) -> dict[str, str]:
            return {"prompt": "".join(tokenizer.pieces(body["tokens"]))}

    def _add_weights(self, app: FastAPI) -> None:
        """The routes of a sync: of weights in files the checksums are computed, and only their name is kept."""

        @app.get("/rollmill/weights")
        async def place() -> dict[str, Any]:
            return asdict(ServerLocation("here", "cpu"))

        @app.post("/sleep")
        async def sleep(level: int) -> None:
            self.events.append(f"sleep {level}")

        @app.post("/wake_up")
        async def wake(tags: str) -> None:
            self.events.append(tags)

        @app.post("/rollmill/weights")
        async def take(request: Request) -> dict[str, Any]:
            self.events.append("update")
            update = msgspec.json.decode(await request.body(), type=WeightUpdateRequest)
            self._version = update.version
            return asdict(
                WeightUpdateResponse(0, 0.0, 0.0, checksums=await asyncio.to_thread(_find_checksums, update))
            )

        @app.post("/update_weight_version")
        async def name(body: dict[str, Any]) -> None:
            self.events.append("version")
            self._version = body["new_version"]


def _find_checksums(update: WeightUpdateRequest) -> dict[str, str]:
    """Those that are asked for of the weights that travel by files."""
    files = [httpx.get(each).content if "://" in each else Path(each).read_bytes() for each in update.files]
    tensors = [each for file in files for each in safetensors.deserialize(file)]  # type: ignore[no-untyped-call]  # it has no types
    return {
        name: hashlib.sha256(each["data"]).hexdigest() for name, each in tensors if name in update.checksums
    }


def _completion(token_ids: Sequence[int], version: str) -> dict[str, Any]:
    n = len(token_ids)
    choice = {
        "token_ids": token_ids,
        "logprobs": {"content": [{"logprob": LOGPROB}] * n},
        "finish_reason": "stop",
        "weight_versions": [{"version": version, "start": 0, "end": n}],
    }
    return {"choices": [choice]}


def _prompt_logprobs(token_ids: Sequence[int]) -> dict[str, Any]:
    by_position = [{str(token): {"logprob": LOGPROB}} for token in token_ids[1:]]
    choice = {"token_ids": [0], "finish_reason": "length"}
    return {"choices": [choice], "prompt_logprobs": [None, *by_position]}
