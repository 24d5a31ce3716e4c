"""The client, against a real server; and against none, a slow one and one that is not vLLM."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.errors import ConnectionLostError, RequestError, ServiceStartError, TransientRequestError
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.responses import decode_completion
from rollmill.tasks.serve.vllm_client import ClientLimits, VllmClient

PROMPT = np.array([5, 9, 40, 12], np.int32)
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "timeout_s": 60.0}


@pytest.fixture
async def client(vllm_server) -> AsyncIterator[VllmClient]:
    patient = ClientLimits(abort_grace_s=60.0)
    async with VllmClient(vllm_server.url, vllm_server.config, limits=patient) as client:
        yield client


async def full_seed(client: VllmClient) -> int:
    """A seed whose completion has every token that was asked for, whatever weights earlier tests left."""
    for seed in range(50):
        completion = await client.generate(PROMPT, **{**SAMPLING, "seed": seed})
        if completion.finish_reason == "length":
            return seed
    raise AssertionError("every completion ends early")


@pytest.mark.service
async def test_a_completion_has_a_logprob_for_every_token(client) -> None:
    completion = await client.generate(PROMPT, **{**SAMPLING, "seed": await full_seed(client)})
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert len(completion.token_ids) == len(completion.logprobs) == 12


@pytest.mark.service
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_logprobs_are_those_the_tokens_were_sampled_by(client, temperature: float) -> None:
    completion = await client.generate(PROMPT, **{**SAMPLING, "temperature": temperature})
    whole = np.concatenate([PROMPT, completion.token_ids])
    raw = (await client.prompt_logprobs(whole))[len(PROMPT) - 1 :]
    if temperature == 1.0:
        np.testing.assert_allclose(completion.logprobs, raw, atol=1e-4)
    else:
        assert np.abs(completion.logprobs - raw).max() > 1e-2


@pytest.mark.service
async def test_prompt_logprobs_add_up_over_the_vocabulary(client) -> None:
    prompts = [np.array([3, token], np.int32) for token in range(57)]
    found = await asyncio.gather(*map(client.prompt_logprobs, prompts))
    assert [each.shape for each in found] == [(1,)] * 57
    assert np.exp(np.concatenate(found)).sum() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.service
async def test_the_seed_decides_the_completion(client) -> None:
    seeds = [1, 1, *range(2, 12)]
    one, again, *others = await asyncio.gather(
        *(client.generate(PROMPT, **{**SAMPLING, "seed": seed}) for seed in seeds)
    )
    assert one.token_ids.tolist() == again.token_ids.tolist()
    assert any(one.token_ids.tolist() != other.token_ids.tolist() for other in others)


@pytest.mark.service
async def test_a_completion_ends_with_a_stop_token_and_keeps_it(client) -> None:
    sampling = {**SAMPLING, "seed": await full_seed(client)}
    whole = await client.generate(PROMPT, **sampling)
    stop = int(whole.token_ids[5])
    ended = await client.generate(PROMPT, **sampling, stop_token_ids=[stop])
    n_kept = whole.token_ids.tolist().index(stop) + 1
    assert ended.token_ids.tolist() == whole.token_ids.tolist()[:n_kept]
    assert ended.finish_reason == "stop"


@pytest.mark.service
async def test_every_completion_names_the_weights_it_came_from(client) -> None:
    await client.set_version("run:3:14")
    completion = await client.generate(PROMPT, **SAMPLING)
    assert await client.version() == "run:3:14"
    assert completion.version_spans == ((0, "run:3:14"),)


@pytest.mark.service
async def test_hundreds_of_requests_at_once_are_all_answered(client) -> None:
    for _ in range(2):  # the second time over connections that are there already
        completions = await asyncio.gather(
            *(client.generate(PROMPT, **{**SAMPLING, "seed": seed}) for seed in range(300))
        )
        assert all(0 < len(each.token_ids) <= 12 for each in completions)


@pytest.mark.service
@pytest.mark.parametrize("wait_s", [0.0, 0.05])
async def test_a_cut_completion_keeps_its_tokens_their_logprobs_and_versions(client, wait_s: float) -> None:
    await client.set_version("run:3:15")
    until = asyncio.get_running_loop().time() + wait_s
    sampling = {**SAMPLING, "max_tokens": 250}
    each = await asyncio.gather(
        *(client.generate(PROMPT, **{**sampling, "seed": seed}, until=until) for seed in range(100))
    )
    cut = [completion for completion in each if completion.finish_reason == "abort"]
    assert cut
    assert all(0 <= len(one.token_ids) == len(one.logprobs) < 250 for one in cut)
    assert all(one.version_spans == ((0, "run:3:15"),) for one in cut if len(one.token_ids))


@pytest.mark.service
async def test_a_request_that_a_paused_server_holds_is_cut_with_its_tokens(client) -> None:
    await client._call("POST", "/pause?mode=keep")
    try:
        until = asyncio.get_running_loop().time() + 0.2
        completion = await client.generate(PROMPT, **SAMPLING, until=until)
    finally:
        await client._call("POST", "/resume")
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logprobs) == 0


@pytest.mark.service
async def test_the_server_tokenizes_as_the_model_does(client) -> None:
    assert await client.tokenize("47+38=") == [6, 9, 39, 5, 10, 43]


@pytest.mark.service
async def test_a_prompt_that_is_too_long_fails_for_good(client) -> None:
    with pytest.raises(RequestError, match="400") as refused:
        await client.generate(np.ones(400, np.int32), **SAMPLING)
    assert not isinstance(refused.value, TransientRequestError)


async def test_an_unreachable_server_is_a_transient_error() -> None:
    async with VllmClient(f"http://127.0.0.1:{free_port()}", ServeConfig()) as client:
        assert not await client.is_healthy()
        with pytest.raises(ConnectionLostError, match="/inference/v1/generate"):
            await client.generate(PROMPT, **SAMPLING)


@pytest.fixture
async def answering(request: pytest.FixtureRequest) -> AsyncIterator[VllmClient]:
    """A client of a server that answers everything with the test's parameter; None: never."""
    held = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if request.param is None:
            await held.wait()
        else:
            writer.write(request.param)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with VllmClient(
        f"http://127.0.0.1:{port}", ServeConfig(), limits=ClientLimits(control_backoff_s=0.01)
    ) as client:
        yield client
    held.set()
    server.close()


def response(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.mark.parametrize("answering", [None], indirect=True)
async def test_no_answer_in_time_is_transient_and_names_the_time(answering) -> None:
    with pytest.raises(TransientRequestError, match=r"no answer within 0\.2 s"):
        await answering.generate(PROMPT, **{**SAMPLING, "timeout_s": 0.2})


@pytest.mark.parametrize("answering", [None], indirect=True)
async def test_a_server_that_returns_nothing_of_a_cut_request_is_not_waited_for(answering) -> None:
    limits = ClientLimits(abort_grace_s=0.1)
    async with VllmClient(answering.url, ServeConfig(), limits=limits) as client:
        with pytest.raises(TimeoutError):
            await client.generate(PROMPT, **SAMPLING, until=asyncio.get_running_loop().time() + 0.05)


async def test_closing_the_connections_fails_open_requests_as_lost() -> None:
    is_asked = asyncio.Event()

    async def take(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            is_asked.set()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with VllmClient(f"http://127.0.0.1:{port}", ServeConfig()) as client:
            waiting = asyncio.ensure_future(client.generate(PROMPT, **SAMPLING))
            await is_asked.wait()
            await client.close()
            with pytest.raises(ConnectionLostError):
                await asyncio.wait_for(waiting, 10)


@pytest.mark.parametrize("answering", [response("503 busy", b"later")], indirect=True)
async def test_a_busy_server_is_transient(answering) -> None:
    with pytest.raises(TransientRequestError, match="503 later"):
        await answering.generate(PROMPT, **SAMPLING)


@pytest.mark.parametrize("answering", [response("200 OK", b"x" * 50)[:-20], b""], indirect=True)
async def test_a_connection_that_breaks_is_lost_and_transient(answering) -> None:
    with pytest.raises(ConnectionLostError):
        await answering.generate(PROMPT, **SAMPLING)


async def test_a_control_call_that_may_be_repeated_is_sent_again() -> None:
    answers = [response("503 busy", b""), b"", response("200 OK", b'{"weight_version": "run:1:2"}')]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answers.pop(0))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with VllmClient(
            f"http://127.0.0.1:{port}", ServeConfig(), limits=ClientLimits(control_backoff_s=0.01)
        ) as client:
            assert await client.version() == "run:1:2"


@pytest.mark.parametrize(
    "answering",
    [response("200 OK", b"<html>"), response("200 OK", b'{"choices": []}')],
    indirect=True,
)
async def test_an_answer_that_cannot_be_read_is_transient_since_another_server_may_give_one(
    answering,
) -> None:
    with pytest.raises(TransientRequestError, match="cannot read its response"):
        await answering.generate(PROMPT, **SAMPLING)


@pytest.mark.parametrize(
    "answering",
    [response("200 OK", b"<html>"), response("200 OK", b"[]"), response("200 OK", b'{"data": []}')],
    indirect=True,
)
async def test_a_control_answer_that_cannot_be_read_is_an_error_of_the_server(answering) -> None:
    for call in (
        answering.version(),
        answering.model(),
        answering.tokenize("a"),
        answering.tokenize_chat([{"role": "user", "content": "a"}]),
        answering.detokenize([1]),
    ):
        with pytest.raises(TransientRequestError, match="cannot read its response"):
            await call


@pytest.mark.parametrize("answering", [response("200 OK", b"healthy\n")], indirect=True)
async def test_a_gateway_may_say_in_words_that_a_server_is_healthy(answering) -> None:
    assert await answering.is_healthy()


@pytest.mark.parametrize("answering", [response("404 no", b"gone")], indirect=True)
async def test_a_missing_route_is_a_permanent_error(answering) -> None:
    with pytest.raises(RequestError) as wrong:
        await answering.generate(PROMPT, **SAMPLING)
    assert not isinstance(wrong.value, TransientRequestError)


@pytest.mark.parametrize(
    ("answering", "can_sample"),
    [
        (response("200 OK", b'{"choices": [{"token_ids": [], "logprobs": {"content": []}}]}'), True),
        (response("200 OK", b"<html>"), False),
        (response("500 broken", b""), False),
    ],
    indirect=["answering"],
)
async def test_a_server_can_sample_when_it_answers_a_small_generation(answering, can_sample: bool) -> None:
    assert await answering.can_sample() == can_sample


def test_a_completion_without_its_logprobs_is_refused() -> None:
    with pytest.raises(LookupError, match="2 tokens came with 0 log-probabilities"):
        decode_completion(b'{"choices": [{"token_ids": [1, 2], "finish_reason": "stop"}]}')


async def test_a_server_that_ends_while_starting_shows_its_last_lines(tmp_path: Path) -> None:
    process = LaunchedProcess.start(
        "vLLM server", ["sh", "-c", "echo no such model; exit 3"], log=tmp_path / "log", stop_grace_s=1.0
    )
    async with VllmClient(f"http://127.0.0.1:{free_port()}", ServeConfig()) as client:
        with pytest.raises(ServiceStartError, match=r"(?s)ended with status 3.*no such model"):
            await client.wait_until_healthy(60.0, process)


async def test_a_server_that_never_answers_names_the_setting() -> None:
    async with VllmClient(f"http://127.0.0.1:{free_port()}", ServeConfig()) as client:
        with pytest.raises(ServiceStartError, match=r"start_timeout_s = 0\.1 s"):
            await client.wait_until_healthy(0.1)
