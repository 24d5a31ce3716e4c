"""Convert text to token ids and back in the flow's process, without a deep-learning framework."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import groupby, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
from jinja2 import TemplateSyntaxError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.environment import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>[]()|?!.,:;"
PAD, EOS = "<pad>", "<eos>"
BYTE_LEVEL_SPACE = "Ġ"
PLACEHOLDER = "rollmill"
"""Written in place of the policy's message where only what follows it is wanted."""
# Templates may write a message's text as JSON or trimmed, but keep such a word as it is.
_WORD = re.compile("[A-Za-z0-9]+")
# A message without these has no thoughts, whose ends are written as <...> or [...].
_MARKUP = "<["

Tools: TypeAlias = Sequence[Mapping[str, object]]
"""JSON schemas of what the policy may call."""


class ChatTokenizer:
    """A model's tokenizer, with the chat template that formats its conversations, if the model has one. Made by `load`.

    Attributes:
        eos_ids: ids of the end-of-sequence tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        chat: "PreTrainedTokenizerFast | None" = None,
        template_name: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer, self.eos_ids = tokenizer, eos_ids
        self._chat, self._template_name, self._arguments = chat, template_name, arguments
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = eos_ids | {each for each, token in added.items() if token.special}
        self._end_texts = [text for each in sorted(eos_ids) if (text := self._tokenizer.id_to_token(each))]

    @classmethod
    def load(cls, model: Path, chat_template: str = "", chat_template_kwargs: str = "") -> Self:
        """Read the tokenizer, its chat templates and the end-of-sequence ids of a model folder.

        Args:
            model: the folder.
            chat_template: rollout.chat_template; empty: the model's.
            chat_template_kwargs: rollout.chat_template_kwargs, a JSON object; empty: none.

        Raises:
            ConfigError: the folder has no fast tokenizer (tokenizer.json), or a broken one; or a chat template cannot be read.
        """
        tokenizer = _read_tokenizer(model)
        if chat_template:
            tokenizer.chat_template = read_chat_template(chat_template)
        arguments = json.loads(chat_template_kwargs or "{}")
        eos_ids = _eos_ids(model, tokenizer.eos_token_id)
        loaded = cls(tokenizer.backend_tokenizer, eos_ids, tokenizer, chat_template, arguments)
        loaded._check_syntax(model)
        return loaded

    @classmethod
    def load_texts(cls, model: Path) -> Self:
        """Read the tokenizer of a model folder for the texts of tokens, without its chat template and end-of-sequence ids.

        The library transformers is not needed.

        Raises:
            ConfigError: the folder has no fast tokenizer, or a broken one.
        """
        file = _find_tokenizer(model)
        try:
            return cls(Tokenizer.from_file(str(file)), frozenset())
        except Exception as error:
            # Tokenizers raises bare Exception for a broken file.
            raise _broken_tokenizer(model, error) from error

    @property
    def has_template(self) -> bool:
        """True if a chat template formats conversations; False if their texts are concatenated."""
        return self._chat is not None and bool(self._chat.chat_template)

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> np.ndarray:
        """Return [T] int32 token ids of a conversation, up to where the policy's next message begins.

        Raises:
            EpisodeError: the chat template refuses the conversation, or leaves out a message.
        """
        text = self._render(messages, tools)
        self._check_written(messages, 0, tools)
        return self._ids(text)

    def encode_reply(
        self,
        messages: Sequence[Message],
        reply: Sequence[Message],
        tools: Tools = (),
        *,
        last_token: int,
    ) -> np.ndarray:
        """Return [T] int32 token ids that the environment's reply adds after the policy's last token.

        Sampled tokens are never re-tokenized: the template renders a placeholder in place of the messages of role assistant before
        the reply, and what follows the last one is used. If the template writes the end mark `last_token` there too, the ids begin after it.

        Args:
            messages: the conversation so far; the policy's message is the last one.
            reply: the environment's messages that follow it; none: the policy speaks again.
            tools: what the policy may call.
            last_token: id of the last token that was sampled.

        Raises:
            EpisodeError: the chat template refuses the conversation, or leaves out text of the reply.
        """
        if not self.has_template:
            return self._ids("".join(message.content for message in reply))
        ids = self._ids(self._text_after(messages, reply, tools))
        return ids[self._count_closing_tokens(ids, last_token) :]

    def check_turns(self, role: Literal["user", "tool"], tools: Tools = ()) -> None:
        """Refuse a chat template that cannot join the turns of a conversation in which `role` answers the policy.

        Raises:
            ConfigError: names the setting for another template.
        """
        messages = (Message("user", "question"), Message("assistant", "policy"))
        function = tools[0].get("function", tools[0]) if tools else {}
        name = str(function.get("name", "tool")) if isinstance(function, Mapping) else "tool"
        reply = Message(role, "answer")
        if role == "tool":
            # Mistral's templates require the id of a call, of nine characters.
            reply = replace(reply, name=name, tool_call_id="000000000")
        try:
            self.encode_reply(messages, (reply,), tools, last_token=-1)
        except EpisodeError as error:
            remedy = f"{error}; give a template that renders messages of role {role} after the policy's, or another environment"
            raise ConfigError("rollout.chat_template", self._template_name, remedy) from error

    def encode_answer(self, answer: str, stop: Sequence[str] = ()) -> np.ndarray:
        """Return [T] int32 token ids of a policy's turn, with an end of sequence unless a stop text ends it."""
        end = [] if answer.endswith(tuple(stop)) else [self._end_id]
        return np.append(self._ids(answer), np.array(end, np.int32)).astype(np.int32)

    @cached_property
    def _end_id(self) -> int:
        """Id of the end of sequence that a policy's turn has: the chat template's, or the tokenizer's where it writes none.

        Models declare several, also that of the base model, which no turn of a conversation ends with.
        """
        question, answer, following = (f"{PLACEHOLDER}{each}" for each in "abc")
        turns = (Message("user", question), Message("assistant", answer), Message("user", following))
        written = ""
        if self.has_template:
            with suppress(EpisodeError):
                written = self._render(turns, ()).partition(answer)[2].partition(following)[0]
        own = self._chat.eos_token_id if self._chat else None
        known: list[int | None] = [*self._ids(written).tolist(), own]
        return next((each for each in known if each is not None and each in self.eos_ids), min(self.eos_ids))

    def write_turn(self, before: Sequence[Message], said: Message, tools: Tools = ()) -> str:
        """Return what the policy wrote to say a message: its text, and its calls in the form of the chat template.

        Args:
            before: the conversation before the message.
            said: a message of role assistant.
            tools: what the policy may call.

        Raises:
            EpisodeError: the message has calls, and no chat template writes them after the header of the policy's message.
        """
        if not said.tool_calls:
            return said.content
        header = self._render(before, tools)
        whole = self._render((*before, said), tools, opens_turn=False) if self.has_template else ""
        if not whole.startswith(header):
            raise EpisodeError(
                "the chat template does not write the policy's calls after the header of its message"
            )
        text = whole[len(header) :]
        text = text[: max((at for end in self._end_texts if (at := text.rfind(end)) >= 0), default=len(text))]
        for call in said.tool_calls:
            if str(call["function"]["name"]) not in text:
                raise EpisodeError("the chat template leaves out the policy's calls")
        return text

    def stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Return the token id of each text of `stop`; these tokens end a turn.

        Raises:
            ConfigError: a text is not a single token of this model.
        """
        ids = {text: self._ids(text).tolist() for text in stop}
        for text, found in ids.items():
            if len(found) != 1:
                remedy = f"its environment ends turns at {text!r}, which must be one token of the model, not {len(found)}"
                raise ConfigError("rollout.environment", text, remedy)
        return tuple(found[0] for found in ids.values())

    def decode(self, token_ids: np.ndarray) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds, special tokens included; concatenated they are the whole text.

        A character of several tokens belongs to the last one. Token ids outside the vocabulary add nothing.
        """
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def _check_syntax(self, model: Path) -> None:
        """Raise ConfigError if the chat template is no Jinja template; `model` is the folder that it is from by default."""
        try:
            self._render((Message("user", "question"),), ())
        except EpisodeError as error:
            # A template may refuse this conversation for other reasons.
            if isinstance(error.__cause__, TemplateSyntaxError):
                field, value = (
                    ("rollout.chat_template", self._template_name)
                    if self._template_name
                    else ("model", str(model))
                )
                at = f"line {error.__cause__.lineno}: {error.__cause__}"
                raise ConfigError(field, value, f"its chat template is not valid Jinja ({at})") from error

    def _text_after(self, messages: Sequence[Message], reply: Sequence[Message], tools: Tools) -> str:
        """Return the text that the template writes after the policy's last message, up to where its next one begins."""
        try:
            return self._text_after_placeholder(messages, reply, tools, calls=False)
        except EpisodeError as error:
            answers = [message for message in (*messages, *reply) if message.role == "tool"]
            if not answers:
                raise
            if not all(message.name for message in answers):
                raise EpisodeError(f"{error}; a message of role tool has no name") from error
            refused = error
        try:
            # Some templates write a tool's message only after a message with a call.
            return self._text_after_placeholder(messages, reply, tools, calls=True)
        except EpisodeError:
            raise refused from None

    def _text_after_placeholder(
        self, messages: Sequence[Message], reply: Sequence[Message], tools: Tools, *, calls: bool
    ) -> str:
        placeholder = _find_unused_word((*messages, *reply), tools)
        turns = (*_replace_policy(messages, reply, placeholder, calls=calls), *reply)
        text = self._render(turns, tools)
        start = text.rfind(placeholder)
        if start < 0:
            raise EpisodeError("the chat template leaves out the policy's messages")
        added = text[start + len(placeholder) :]
        if calls and reply and reply[0].role == "tool":
            # The rest of the call is the policy's text; the template closes it with an end of sequence.
            ends = [at for end in self._end_texts if (at := added.find(end)) >= 0]
            if not ends:
                raise EpisodeError("the chat template ends no call with an end of sequence of the model")
            added = added[min(ends) :]
        at = 0
        for message in reply:
            for word in _WORD.findall(message.content):
                at = added.find(word, at) + len(word)
                if at < len(word):
                    raise EpisodeError(_describe_left_out(message))
        self._check_written(turns, len(messages), tools)
        return added

    def _check_written(self, messages: Sequence[Message], first: int, tools: Tools) -> None:
        """Raise EpisodeError if the template leaves out one of the messages from index `first` on, or cuts it.

        A word added at both ends of each of them shows this: the words that a message has may be in the text for another reason.
        """
        if not self.has_template:
            return
        mark = _find_unused_word(messages, tools)
        marked, marks = list(messages), list[tuple[Message, str]]()
        for i, each in enumerate(messages[first:], first):
            begin, end = f"{mark}x{i}b", f"{mark}x{i}e"
            if each.role == "assistant" and any(sign in each.content for sign in _MARKUP):
                # Templates leave out earlier thoughts, with which such a message may begin.
                begin = ""
            if each.content:
                marked[i] = replace(each, content=f"{begin} {each.content} {end}".lstrip())
                marks += [(each, begin), (each, end)]
        text = self._render(marked, tools)
        for each, word in marks:
            if word not in text:
                raise EpisodeError(_describe_left_out(each))

    def _count_closing_tokens(self, ids: np.ndarray, last_token: int) -> int:
        """Return how many of the first `ids` close the policy's turn up to `last_token`, which it sampled; 0 without it there."""
        for i, each in enumerate(ids.tolist()):
            if each in self._special_ids:
                if each == last_token:
                    return i + 1
            elif self._tokenizer.decode([each]).strip():
                break
        return 0

    def _render(self, messages: Sequence[Message], tools: Tools, *, opens_turn: bool = True) -> str:
        """Return the text of a conversation and, with `opens_turn`, the header of the policy's next message."""
        if self._chat is None or not self._chat.chat_template:
            return "".join(message.content for message in messages)
        turns: list[Any] = [message.as_json() for message in messages]
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            text = self._chat.apply_chat_template(
                turns, tools=offered, add_generation_prompt=opens_turn, tokenize=False, **self._arguments
            )
        except Exception as error:
            # A template is foreign code: its expressions raise whatever they do.
            roles = ", ".join(message.role for message in messages)
            raise EpisodeError(f"the chat template refuses a conversation of {roles}: {error}") from error
        return str(text)


def _find_tokenizer(model: Path) -> Path:
    file = model / "tokenizer.json"
    if not file.is_file():
        remedy = "not a model folder with a fast tokenizer (tokenizer.json is missing)"
        raise ConfigError("model", str(model), remedy)
    return file


def _broken_tokenizer(model: Path, error: Exception) -> ConfigError:
    return ConfigError("model", str(model), f"not a model folder with a fast tokenizer ({error})")


def _read_tokenizer(model: Path) -> "PreTrainedTokenizerFast":
    _find_tokenizer(model)
    # The import takes a second, and commands that load no tokenizer import this module too. This class, unlike
    # AutoTokenizer, does not import torch.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            model, local_files_only=True
        )
    except Exception as error:
        # Tokenizers raises bare Exception for a broken file.
        raise _broken_tokenizer(model, error) from error
    return tokenizer


def _find_unused_word(messages: Sequence[Message], tools: Tools) -> str:
    """Return PLACEHOLDER, with as many zeros after it as it takes for no message and no tool to have the word."""
    known = json.dumps([[message.as_json() for message in messages], [dict(tool) for tool in tools]])
    word = PLACEHOLDER
    while word in known:
        word += "0"
    return word


def _describe_left_out(message: Message) -> str:
    return f"the chat template leaves out text of a message of role {message.role} ({message.content[:80]!r})"


def _replace_policy(
    messages: Sequence[Message], reply: Sequence[Message], placeholder: str, *, calls: bool
) -> tuple[Message, ...]:
    """Return a conversation before a reply with `placeholder` as the text of its messages of role assistant.

    With `calls`, a message that tools answer calls each of them instead, with the placeholder as argument.
    """
    turns: list[Message] = []
    whole = (*messages, *reply)
    for i, message in enumerate(messages):
        if message.role != "assistant" or message.tool_calls:
            turns.append(message)
            continue
        answers = takewhile(lambda each: each.role == "tool", whole[i + 1 :]) if calls else ()
        called: tuple[dict[str, Any], ...] = tuple(
            {
                "id": each.tool_call_id,
                "type": "function",
                "function": {"name": each.name, "arguments": {placeholder: placeholder}},
            }
            for each in answers
        )
        turns.append(replace(message, content="" if called else placeholder, tool_calls=called))
    return tuple(turns)


def read_chat_template(setting: str) -> str:
    """Return the chat template that rollout.chat_template gives, as its text or as the path of a file with it.

    As for vLLM, a value with a brace or a line break is a text.

    Raises:
        ConfigError: the file cannot be read.
    """
    if any(each in setting for each in "{}\n"):
        return setting
    try:
        return Path(setting).read_text()
    except (OSError, ValueError) as error:
        remedy = f"give the path of a readable file with a chat template, or the template itself ({error})"
        raise ConfigError("rollout.chat_template", setting, remedy) from error


def _eos_ids(model: Path, eos_id: int | None) -> frozenset[int]:
    file = model / "generation_config.json"
    declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    ids = declared if isinstance(declared, list) else [declared]
    return frozenset(int(each) for each in (*ids, eos_id) if each is not None)


def save_character_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with 57 tokens, two specials and one for each character; returns the folder.

    It is a byte-level BPE without merges, so that libraries which load the vocabulary into Qwen2's tokenizer get the same ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    characters = CHARACTERS.replace(" ", BYTE_LEVEL_SPACE)
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def tokenize_conversation(
    tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Tools = (), stop: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return ([T] int32 token ids, [T] bool True on the policy's tokens) of a conversation that ends with the policy.

    Example: "47+38=" and "85" give the ids of `47+38=85<eos>`, and True on the last three.
    """
    parts: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    done: tuple[Message, ...] = ()
    for is_policy, group in groupby(messages, key=lambda message: message.role == "assistant"):
        turn = tuple(group)
        if is_policy:
            part = tokenizer.encode_answer("".join(message.content for message in turn), stop)
        elif not done:
            part = tokenizer.encode(turn, tools)
        else:
            part = tokenizer.encode_reply(done, turn, tools, last_token=int(parts[-1][-1]))
        parts.append(part)
        masks.append(np.full(len(part), is_policy))
        done += turn
    return np.concatenate(parts), np.concatenate(masks)
