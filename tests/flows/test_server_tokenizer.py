"""What a server renders of an opening with tools is compared with what we render, on a real vLLM."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from model_families import save_tiny_family

from rollmill.flows.policies.server_parity import Openings
from rollmill.flows.policies.server_tokenizer import check_tokenizer, describe_difference, normalize_tools
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import Example, Message, SingleTurn
from rollmill.tasks.serve.config import ServeConfig
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.serve.vllm_launch import vllm_command

PLANTED = chat_templates.QWEN3.replace("tool | tojson", "tool | tojson(indent=4)")
NO_THINKING = '{"enable_thinking": false}'
TOOL = {
    "function": {"parameters": {"type": "object", "properties": {}}, "name": "now", "returns": "a time"},
    "type": "function",
}
"""Without a description, in another order, with one more field: not as vLLM passes it to a template."""


class Asking:
    """An environment with one opening and these tools."""

    name, stop = "asking", ()

    def __init__(self, tools: Sequence[Mapping[str, object]] = ()) -> None:
        self.tools = tools

    def size(self, split: str) -> int:
        return 1

    async def example(self, split: str, index: int) -> Example:
        return Example("0", {})

    def episode(self, example: Example, seed: int) -> SingleTurn:
        return SingleTurn((Message("system", "Be brief."), Message("user", "What time is it?")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_family(tmp_path_factory.mktemp("family") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def url(
    run_server: Callable[..., AbstractContextManager[Any]],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A server of the model with another chat template, which writes tools differently, and an argument of it."""
    command = vllm_command(ServeConfig(), "", 0, chat_template=PLANTED, chat_template_kwargs=NO_THINKING)
    at = command.index("--chat-template")
    with run_server(model, extra_args=tuple(command[at : at + 4])) as served:
        yield served.url


@pytest.fixture(scope="module")
def check(url: str) -> Callable[..., None]:
    """Compare the server with a model folder, for an environment with these tools."""

    def checked(
        folder: Path,
        tools: Sequence[Mapping[str, object]] = (),
        template: str = "",
        arguments: str = NO_THINKING,
    ) -> None:
        async def compare() -> None:
            tokenizer = ChatTokenizer.load(folder, template, arguments)
            openings = Openings(Asking(tools), tokenizer, max_tokens=512, timeout_s=60.0)
            async with VllmClient(url, ServeConfig()) as client:
                await check_tokenizer(openings, client)

        asyncio.run(compare())

    return checked


@pytest.mark.service
def test_a_server_with_another_template_for_tools_is_refused_where_there_are_tools(
    check: Callable[..., None], model: Path
) -> None:
    check(model)
    with pytest.raises(ConfigError) as raised:
        check(model, (TOOL,))
    message = str(raised.value)
    assert "its chat template is not the model's: after '<|im_start|>system\\nBe brief." in message
    assert '<tools>\\n{\' it renders \'\\n    "type": "function"' in message
    assert ', not \'"type": "function", "function": {"name": "now"' in message
    assert "with --chat-template and --default-chat-template-kwargs as rollout.chat_template" in message


@pytest.mark.service
def test_a_server_with_other_arguments_of_the_template_is_refused(
    check: Callable[..., None], model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"it renders '<think>.*', not ''; start it"):
        check(model, arguments="")


@pytest.mark.service
def test_a_server_with_the_runs_template_passes_whatever_the_form_of_the_tools(
    check: Callable[..., None], model: Path
) -> None:
    check(model, (TOOL,), PLANTED)
    check(model, ({"name": "none that vLLM takes"},), PLANTED)


@pytest.mark.service
def test_a_server_with_another_tokenizer_is_refused(
    check: Callable[..., None], model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="its tokenizer is not the model's: from token 1 on it reads"):
        check(folder)


def test_the_first_difference_of_two_texts_is_quoted_with_what_is_before() -> None:
    message = describe_difference("a" * 100 + "<end>", [1], "a" * 100, [2])
    assert f"after {'a' * 60!r} it renders '', not '<end>'; start it" in message


def test_tools_have_the_fields_and_the_order_of_vllms_types() -> None:
    (tool,) = normalize_tools([TOOL])
    assert json.dumps(tool) == (
        '{"type": "function", "function": {"name": "now", "description": null, '
        '"parameters": {"type": "object", "properties": {}}}}'
    )
    assert normalize_tools([TOOL, {"name": "bare"}]) == []
