"""Generations as arrays, from vLLM's environment to the client."""

import base64
import json
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.http_connection import HttpConnection
from rollmill.tasks.serve.responses import ARRAYS, decode_completion
from rollmill.tasks.serve.vllm_client import VllmClient

REPOSITORY = Path(__file__).parents[2]
ROUTE = "/inference/v1/generate"

IN_VLLMS_ENVIRONMENT = """
import base64, json
import numpy as np
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs, GenerateLogProbsContent, GenerateRequest, GenerateTokensChoice, GenerateTokensResponse,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import SamplingParams
from vllm.utils.serial_utils import numpy2base64

from rollmill.tasks.sync.vllm_plugin import server_routes

ids, logprobs = [7, 9, 1], [-0.5, -1.25, -0.125]
experts = np.arange(5 * 3 * 2, dtype=np.uint16).reshape(5, 3, 2)
spans = [WeightVersionSpan("run:1:4", 0, 1), WeightVersionSpan("run:1:5", 1, 3)]
output = CompletionOutput(
    0, "", ids, 0.0, [{i: Logprob(p, 1, None)} for i, p in zip(ids, logprobs)], experts, "stop", weight_versions=spans
)
content = [GenerateLogProbsContent(token_id=i, logprob=p, rank=1) for i, p in zip(ids, logprobs)]
choice = GenerateTokensChoice(
    index=0, token_ids=ids, logprobs=GenerateLogProbs(content=content), finish_reason="stop",
    weight_versions=spans, routed_experts=numpy2base64(experts),
)
whole = GenerateTokensResponse(request_id="r", created=0, model="m", choices=[choice], usage=UsageInfo())
asked = GenerateRequest.model_validate(
    {"request_id": "r", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "routed_experts_prompt_start": 2}}
)
print("ANSWER" + json.dumps({
    "json": whole.model_dump_json(),
    "arrays": base64.b64encode(server_routes.encode_arrays(output)).decode(),
    "media_type": server_routes.ARRAYS,
    "start": asked.sampling_params.routed_experts_prompt_start,
}))
"""


@pytest.mark.service
def test_the_encodings_of_vllm_and_of_the_plugin_decode_to_the_same_completion() -> None:
    python = Path(ServeConfig().python).absolute()
    done = subprocess.run(
        [str(python), "-c", IN_VLLMS_ENVIRONMENT],
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ANSWER" in done.stdout, done.stderr
    answer = json.loads(done.stdout.partition("ANSWER")[2])
    assert (answer["media_type"], answer["start"]) == (ARRAYS, 2)
    for body in (answer["json"].encode(), base64.b64decode(answer["arrays"])):
        completion = decode_completion(body)
        assert completion.token_ids.tolist() == [7, 9, 1]
        assert completion.logprobs.tolist() == [-0.5, -1.25, -0.125]
        assert completion.finish_reason == "stop"
        assert completion.version_spans == ((0, "run:1:4"), (1, "run:1:5"))
        expected = np.arange(30, dtype=np.uint16).reshape(5, 3, 2)
        assert completion.routed_experts is not None
        assert completion.routed_experts.dtype == np.uint16
        np.testing.assert_array_equal(completion.routed_experts, expected)


@pytest.mark.service
async def test_a_server_answers_with_arrays_what_it_answers_with_json(vllm_server) -> None:
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 0, "detokenize": False}
    asked = msgspec.json.encode({"token_ids": [5, 9, 40, 12], "sampling_params": sampling})
    connection = HttpConnection(vllm_server.url, api_key="", connect_timeout_s=10.0)
    try:
        arrays, text = [await connection.send("POST", ROUTE, asked, 60.0, each) for each in (ARRAYS, "")]
    finally:
        await connection.close()
    assert bytes(arrays[:1]) != b"{"
    assert bytes(text[:1]) == b"{"
    one, other = decode_completion(arrays), decode_completion(text)
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert (one.finish_reason, one.version_spans) == (other.finish_reason, other.version_spans)
    assert one.version_spans


@pytest.mark.service
async def test_missing_routed_experts_are_an_error_at_the_start_of_a_server(vllm_server) -> None:
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        with pytest.raises(Exception, match="--enable-return-routed-experts"):
            await client.warm_up(60.0, needs_routing=True)
