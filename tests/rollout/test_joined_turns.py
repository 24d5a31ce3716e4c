"""Turns of a conversation are joined as each family of chat templates writes them, and what was sampled stays as it is."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import chat_templates as templates
import numpy as np
import pytest
from model_families import save_byte_tokenizer

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.environment import Example, Message
from rollmill.tasks.rollout.episode import EpisodePlayer, SampledTokens
from rollmill.tasks.rollout.trajectory import Trajectory, TrajectoryRequest

TOOLS = ({"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}},)
ASKED = Message("user", "guess")
HINT, RESULT = Message("user", "higher"), Message("tool", "7", name="price", tool_call_id="abcdefghi")
SPECIAL = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>|<(?:start|end)_of_turn>|<bos>|<sop>|\[gMASK\]")
HEADERS = (
    *("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|tool|>", "<|end|>", "<|im_sep|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"),
)


@dataclass(frozen=True)
class Form:
    """What the documentation of a family of models says about its conversations, as text.

    Attributes:
        ends: what the policy ends its message with: before a user's, and before a tool's.
        header: what the policy's message begins after.
        user: what is between the policy's end and its next message, for the user's message `higher`.
        tool: the same for a tool's message `7`; empty: there is none.
        thinks: what the policy writes before its answer if it thinks.
        arguments: arguments of the template.
    """

    template: str
    ends: tuple[str, str]
    header: str
    user: str
    tool: str = ""
    thinks: str = "<think>\nhm\n</think>\n\n"
    arguments: str = ""


def chatml(
    template: str,
    *,
    tool: str = "user\n<tool_response>\n7\n</tool_response>",
    header: str = "",
    thinks: str = "<think>\nhm\n</think>\n\n",
    arguments: str = "",
) -> Form:
    begins = f"<|im_start|>assistant\n{header}"
    after_user = f"\n<|im_start|>user\nhigher<|im_end|>\n{begins}"
    after_tool = f"\n<|im_start|>{tool}<|im_end|>\n{begins}"
    return Form(template, ("<|im_end|>",) * 2, begins, after_user, after_tool, thinks, arguments)


def phi(template: str, break_: str, *, has_tools: bool) -> Form:
    begins = f"<|assistant|>{break_}"
    after_user = f"{break_}<|user|>{break_}higher<|end|>{break_}{begins}"
    after_tool = f"{break_}<|tool|>{break_}7<|end|>{break_}{begins}" if has_tools else ""
    return Form(template, ("<|end|>",) * 2, begins, after_user, after_tool)


LLAMA_BEGINS = "<|start_header_id|>assistant<|end_header_id|>\n\n"
COHERE_BEGINS = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
NO_THINKING = '{"enable_thinking": false}'
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
FORMS = {
    "Qwen 2.5": chatml(templates.QWEN2_5),
    "Qwen 3": chatml(templates.QWEN3),
    "Qwen 3, not thinking": chatml(templates.QWEN3, header=EMPTY_BLOCK, thinks="", arguments=NO_THINKING),
    "Qwen 3.5": chatml(templates.QWEN3_5, header="<think>\n", thinks="hm\n</think>\n\n"),
    "Qwen 3.5, not thinking": chatml(templates.QWEN3_5, header=EMPTY_BLOCK, thinks="", arguments=NO_THINKING),
    "Nemotron 3": chatml(
        templates.NEMOTRON3,
        tool="user\n<tool_response>\n7\n</tool_response>\n",
        header="<think>\n",
        thinks="hm\n</think>\n",
    ),
    "LFM 2": chatml(templates.LFM2, tool="tool\n<|tool_response_start|>7<|tool_response_end|>"),
    "with blocks for training": chatml(templates.GENERATION, tool="tool\n7"),
    "Llama 3": Form(
        templates.LLAMA3,
        ("<|eot_id|>",) * 2,
        LLAMA_BEGINS,
        f"<|start_header_id|>user<|end_header_id|>\n\nhigher<|eot_id|>{LLAMA_BEGINS}",
        f'<|start_header_id|>ipython<|end_header_id|>\n\n"7"<|eot_id|>{LLAMA_BEGINS}',
    ),
    "DeepSeek V3": Form(
        templates.DEEPSEEK3,
        (templates.widen_bars("<|end▁of▁sentence|>"),) * 2,
        templates.widen_bars("<|Assistant|>"),
        templates.widen_bars("<|User|>higher<|Assistant|>"),
        templates.widen_bars(
            "<|tool▁outputs▁begin|><|tool▁output▁begin|>7<|tool▁output▁end|><|tool▁outputs▁end|>"
        ),
    ),
    "Phi 3": phi(templates.PHI3, "\n", has_tools=False),
    "Phi 4 mini": phi(templates.PHI4_MINI, "", has_tools=True),
    "Phi 4": Form(
        templates.PHI4,
        ("<|im_end|>",) * 2,
        "<|im_start|>assistant<|im_sep|>",
        "<|im_start|>user<|im_sep|>higher<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "gpt-oss": Form(
        templates.HARMONY,
        ("<|return|>", "<|call|>"),
        "<|start|>assistant",
        "<|end|><|start|>user<|message|>higher<|end|><|start|>assistant",
        '<|start|>functions.price to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant',
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "Gemma 3": Form(
        templates.GEMMA3,
        ("<end_of_turn>",) * 2,
        "<start_of_turn>model\n",
        "\n<start_of_turn>user\nhigher<end_of_turn>\n<start_of_turn>model\n",
    ),
    "GLM 4": Form(
        templates.GLM4,
        ("<|user|>", "<|observation|>"),
        "<|assistant|>",
        "\nhigher<|assistant|>",
        "\n7<|assistant|>",
    ),
    "GLM 4 MoE": Form(
        templates.GLM4_MOE,
        ("<|user|>", "<|observation|>"),
        "<|assistant|>",
        "\nhigher<|assistant|>",
        "\n<tool_response>\n7\n</tool_response><|assistant|>",
        "\n<think>hm</think>\n",
    ),
    "Cohere 2": Form(
        templates.COHERE2,
        ("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",) * 2,
        COHERE_BEGINS,
        f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>higher<|END_OF_TURN_TOKEN|>{COHERE_BEGINS}",
    ),
}
REPLIES: Mapping[str, tuple[Message, ...]] = {
    "a user": (HINT,),
    "a user twice": (HINT, HINT),
    "a tool": (RESULT,),
    "a tool twice": (RESULT, RESULT),
    "a tool, then a user": (RESULT, HINT),
}


class Conversation:
    """An environment that asks, and gives these replies; it is its only episode."""

    name, stop = "conversation", ()

    def __init__(self, replies: Sequence[Message]) -> None:
        self.replies = replies
        self.tools = TOOLS if RESULT in replies else ()

    def size(self, split: str) -> int:
        return 1

    async def example(self, split: str, index: int) -> Example:
        return Example("0", {})

    def episode(self, example: Example, seed: int) -> "Conversation":
        return self

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        n = sum(message.role == "assistant" for message in messages)
        return (ASKED, *self.replies)[n : n + 1]

    async def close(self) -> Mapping[str, object]:
        return {}


class ByteSampler:
    """Samples prepared texts letter by letter, as no tokenizer would read them; keeps what it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, texts: Sequence[str]) -> None:
        self.sampled = [_read_letters(tokenizer, text) for text in texts]
        self.asked: list[np.ndarray] = []

    async def sample(self, work: TrajectoryRequest, token_ids: np.ndarray, until: float) -> SampledTokens:
        ids = self.sampled[len(self.asked)]
        self.asked.append(token_ids)
        return SampledTokens(ids, np.zeros(len(ids), np.float32), [(0, 0)], "stop", "http://server")


def _read_letters(tokenizer: ChatTokenizer, text: str) -> np.ndarray:
    """Return the ids of a text, one for each character outside of its special tokens."""

    def split() -> Iterator[str]:
        at = 0
        for match in SPECIAL.finditer(text):
            yield from (*text[at : match.start()], match[0])
            at = match.end()
        yield from text[at:]

    return np.concatenate([tokenizer._ids(each) for each in split()])


Load = Callable[[Form], ChatTokenizer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of all families."""
    texts = "".join(each for form in FORMS.values() for each in (form.template, *form.ends, form.header))
    specials = dict.fromkeys(
        ["<|endoftext|>", *HEADERS, *SPECIAL.findall(texts), "<|START_RESPONSE|>", "<|im_end|>"]
    )
    settings = {"bos_token": "<|begin_of_text|>"}
    return save_byte_tokenizer(tmp_path_factory.mktemp("templates"), specials=tuple(specials), **settings)


@pytest.fixture
def load(model: Path) -> Load:
    def loaded(form: Form) -> ChatTokenizer:
        stored = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
        ids = {each["content"]: each["id"] for each in stored}
        ends = [ids[SPECIAL.findall(each)[-1]] for each in form.ends]
        (model / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [*ends, ids["<|endoftext|>"]]})
        )
        return ChatTokenizer.load(model, form.template, form.arguments)

    return loaded


async def play(
    tokenizer: ChatTokenizer, replies: Sequence[Message], said: Sequence[str]
) -> tuple[Trajectory, ByteSampler]:
    sampler = ByteSampler(tokenizer, said)
    player = EpisodePlayer(Conversation(replies), tokenizer, sampler, max_tokens=4096, timeout_s=60.0)
    return await player.play(TrajectoryRequest("t", 0, 0, 0, Example("0", {}), 0, 1.0)), sampler


def show(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    return "".join(tokenizer.pieces(ids.tolist()))


@pytest.mark.parametrize("thinks", [False, True], ids=["without thoughts", "with thoughts"])
@pytest.mark.parametrize("answers", REPLIES)
@pytest.mark.parametrize("family", FORMS)
async def test_turns_are_joined_in_the_form_of_the_family(
    load: Load, family: str, answers: str, thinks: bool
) -> None:
    form, replies = FORMS[family], REPLIES[answers]
    tokenizer = load(form)
    ends = [form.ends[reply.role == "tool"] for reply in (*replies, HINT)]
    said = [f"{form.thinks if thinks else ''}12{end}" for end in ends]
    trajectory, sampler = await play(tokenizer, replies, said)
    if RESULT in replies and not form.tool:
        assert (trajectory.status, len(trajectory.turns)) == ("failed", 1)
        assert re.search("roles must alternate|leaves out text of a message of role tool", trajectory.error)
        return
    assert (trajectory.status, trajectory.error) == ("complete", "")
    opening = show(tokenizer, sampler.asked[0])
    assert opening.endswith(form.header)
    after = {"user": form.user, "tool": form.tool}
    joined = "".join(text + after[reply.role] for text, reply in zip(said, replies, strict=False))
    assert show(tokenizer, trajectory.token_ids) == opening + joined + said[-1]


@pytest.mark.parametrize("family", FORMS)
async def test_each_turn_continues_the_tokens_of_the_one_before_and_the_sampled_ones(
    load: Load, family: str
) -> None:
    form = FORMS[family]
    said = [f"{form.thinks}12{form.ends[0]}"] * 3
    trajectory, sampler = await play(load(form), (HINT, HINT), said)
    for before, sampled, after in zip(sampler.asked, sampler.sampled, sampler.asked[1:], strict=False):
        known = np.concatenate([before, sampled])
        assert after[: len(known)].tolist() == known.tolist()
    trained = trajectory.token_ids[trajectory.loss_mask]
    assert trained.tolist() == np.concatenate(sampler.sampled).tolist()


@pytest.mark.parametrize(
    ("family", "said", "reply", "expected"),
    [
        ("Qwen 3", "12<|endoftext|>", HINT, "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n"),
        ("Phi 3", "12<|endoftext|>", HINT, "<|end|>\n<|user|>\nhigher<|end|>\n"),
        ("GLM 4", "12<|endoftext|>", HINT, "<|user|>\nhigher"),
        ("GLM 4", "12<|user|>", RESULT, "<|observation|>\n7"),
        ("Cohere 2", "12<|END_OF_TURN_TOKEN|>", HINT, "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>higher"),
        ("Cohere 2", "12", HINT, "<|END_RESPONSE|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"),
        ("gpt-oss", "12<|return|>", RESULT, "<|call|><|start|>functions.price to=assistant"),
    ],
)
def test_the_end_that_was_sampled_is_not_repeated_and_another_one_is_kept(
    load: Load, family: str, said: str, reply: Message, expected: str
) -> None:
    tokenizer = load(FORMS[family])
    last = int(_read_letters(tokenizer, said)[-1])
    added = tokenizer.encode_reply((ASKED, Message("assistant", "12")), (reply,), last_token=last)
    assert show(tokenizer, added).startswith(expected)


def test_a_reply_may_have_the_words_of_the_placeholder_and_of_the_policy(load: Load) -> None:
    tokenizer = load(FORMS["Qwen 3"])
    quoted = Message("user", "rollmill rollmill0 </think> 12")
    added = tokenizer.encode_reply((quoted, Message("assistant", "rollmill")), (quoted,), last_token=-1)
    expected = f"<|im_end|>\n<|im_start|>user\n{quoted.content}<|im_end|>\n<|im_start|>assistant\n"
    assert show(tokenizer, added) == expected


def test_several_tools_answer_one_message(load: Load) -> None:
    form = FORMS["GLM 4 MoE"]
    tokenizer = load(form)
    other = Message("tool", "8", name="price")
    added = tokenizer.encode_reply((ASKED, Message("assistant", "12")), (RESULT, other), TOOLS, last_token=-1)
    responses = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (7, 8))
    assert show(tokenizer, added) == f"<|observation|>{responses}<|assistant|>"


def test_a_tool_without_a_name_cannot_answer_a_call(load: Load) -> None:
    said = (ASKED, Message("assistant", "12"))
    with pytest.raises(EpisodeError, match="a tool answers no call; a message of role tool has no name"):
        load(FORMS["gpt-oss"]).encode_reply(said, (Message("tool", "7"),), last_token=-1)


@pytest.mark.parametrize("family", FORMS)
def test_a_template_that_cannot_join_turns_is_refused_with_a_remedy(load: Load, family: str) -> None:
    form = FORMS[family]
    tokenizer = load(form)
    tokenizer.check_turns("user")
    if form.tool:
        tokenizer.check_turns("tool", TOOLS)
        return
    with pytest.raises(ConfigError, match=r"rollout\.chat_template = .*give a template that renders"):
        tokenizer.check_turns("tool", TOOLS)


def test_a_template_that_needs_the_id_of_a_call_is_not_refused(load: Load) -> None:
    load(Form(templates.MISTRAL, ("<|im_end|>",) * 2, "", "")).check_turns("tool", TOOLS)


NOTE = Message("assistant", "user hint")


def test_a_reply_keeps_its_own_messages_of_role_assistant(load: Load) -> None:
    tokenizer = load(FORMS["Qwen 2.5"])
    added = tokenizer.encode_reply((ASKED, Message("assistant", "12")), (NOTE, HINT), last_token=-1)
    turns = "<|im_start|>assistant\nuser hint<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n"
    assert show(tokenizer, added) == f"<|im_end|>\n{turns}<|im_start|>assistant\n"


# Leaves out a message after one of the same role.
ALTERNATING = """\
{%- for message in messages %}
{%- if loop.first or message.role != loop.previtem.role %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""


@pytest.mark.parametrize(
    ("reply", "dropped"),
    [
        ((NOTE, HINT), "assistant \\('user hint'\\)"),
        ((HINT, HINT), "user \\('higher'\\)"),
        ((HINT, Message("user", "user")), "user \\('user'\\)"),
    ],
    ids=["one of the environment's", "the text of another message", "a word of a header"],
)
def test_a_message_of_a_reply_that_the_template_leaves_out_is_named(
    load: Load, reply: tuple[Message, ...], dropped: str
) -> None:
    tokenizer = load(Form(ALTERNATING, ("<|im_end|>",) * 2, "", ""))
    with pytest.raises(EpisodeError, match=f"leaves out text of a message of role {dropped}"):
        tokenizer.encode_reply((ASKED, Message("assistant", "12")), reply, last_token=-1)


def test_thoughts_of_the_environment_that_the_template_leaves_out_are_named(load: Load) -> None:
    thought = Message("assistant", "<think>\nhm\n</think>\n\n13")
    said = (ASKED, Message("assistant", "12"))
    with pytest.raises(EpisodeError, match="leaves out text of a message of role assistant \\('<think>"):
        load(FORMS["Qwen 3"]).encode_reply(said, (thought, HINT), last_token=-1)


def test_a_message_of_the_opening_that_the_template_leaves_out_is_named(load: Load) -> None:
    opening = (Message("system", "user"), ASKED)
    with pytest.raises(EpisodeError, match="leaves out text of a message of role system \\('user'\\)"):
        load(FORMS["Cohere 2"]).encode(opening)


@pytest.mark.parametrize("cut", ["[7:]", "[:-7]"], ids=["beginning", "end"])
def test_a_message_of_the_opening_that_the_template_cuts_is_named(load: Load, cut: str) -> None:
    form = Form(f"{{{{ messages[0].content{cut} }}}}", ("<|im_end|>",) * 2, "", "")
    with pytest.raises(EpisodeError, match="leaves out text of a message of role user"):
        load(form).encode((Message("user", "please guess"),))


@pytest.mark.parametrize("cut", ["[7:]", "[:-7]"], ids=["beginning", "end"])
def test_an_answer_in_the_opening_that_the_template_cuts_is_named(load: Load, cut: str) -> None:
    text = f"{{% for each in messages %}}{{{{ each.content{cut} if each.role == 'assistant' else each.content }}}}|{{% endfor %}}"
    form = Form(text, ("<|im_end|>",) * 2, "", "")
    opening = (Message("user", "please guess"), Message("assistant", "it is three"), Message("user", "again"))
    with pytest.raises(EpisodeError, match="leaves out text of a message of role assistant"):
        load(form).encode(opening)


def test_a_template_that_leaves_out_earlier_messages_is_refused(load: Load) -> None:
    form = Form("{{ messages[-1].content }}", ("<|im_end|>",) * 2, "", "")
    with pytest.raises(ConfigError, match="leaves out the policy's messages"):
        load(form).check_turns("user")
