"""Convert text to token ids and back in the flow's process, without a deep-learning framework."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jinja2 import TemplateError
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

Tools: TypeAlias = Sequence[Mapping[str, object]]
"""JSON schemas of what the policy may call."""


class ChatTokenizer:
    """A model's tokenizer, with the chat template that formats its conversations, if the model has one."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", eos_ids: frozenset[int]) -> None:
        self._chat = tokenizer
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self.eos_ids = eos_ids
        self._end_texts = [text for each in sorted(eos_ids) if (text := self._tokenizer.id_to_token(each))]

    @classmethod
    def load(cls, model: Path) -> "ChatTokenizer":
        """Read the tokenizer, its chat templates and the end-of-sequence ids of a model folder.

        Raises:
            ConfigError: the folder has no fast tokenizer (tokenizer.json), or a broken one.
        """
        if not (model / "tokenizer.json").is_file():
            remedy = "not a model folder with a fast tokenizer (tokenizer.json is missing)"
            raise ConfigError("model", str(model), remedy)
        # The import takes a second, and commands that load no tokenizer import this module too. This class, unlike
        # AutoTokenizer, does not import torch.
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
        except Exception as error:
            # Tokenizers raises bare Exception for a broken file.
            raise ConfigError(
                "model", str(model), f"not a model folder with a fast tokenizer ({error})"
            ) from error
        return cls(tokenizer, _eos_ids(model, tokenizer.eos_token_id))

    @property
    def has_template(self) -> bool:
        """True if a chat template formats conversations; False if their texts are concatenated."""
        return bool(self._chat.chat_template)

    def encode(self, messages: Sequence[Message], tools: Tools = ()) -> np.ndarray:
        """Return [T] int32 token ids of a conversation, up to where the policy's next message begins."""
        return self._ids(self._render(messages, tools, ask=True))

    def encode_reply(
        self,
        messages: Sequence[Message],
        reply: Sequence[Message],
        tools: Tools = (),
        *,
        is_ended: bool = True,
    ) -> np.ndarray:
        """Return [T] int32 token ids that the environment's reply adds after the policy's last token.

        Sampled tokens are never re-tokenized: the template renders a placeholder in their place, and the text after it is used.
        The policy's message is the last of `messages`; `is_ended` is True if its last token is an end of sequence, False if it is a
        stop text.

        Raises:
            EpisodeError: the chat template renders earlier messages differently than before.
        """
        said = (*messages[:-1], replace(messages[-1], content=PLACEHOLDER))
        before, after = self._render(said, tools, ask=False), self._render((*said, *reply), tools, ask=True)
        start = before.rfind(PLACEHOLDER) + len(PLACEHOLDER)
        if not after.startswith(before) or start < len(PLACEHOLDER):
            raise EpisodeError(
                "the chat template rewrites earlier turns, so turns cannot be joined by token ids"
            )
        added = after[start:]
        end = next((text for text in self._end_texts if added.startswith(text)), "") if is_ended else ""
        return self._ids(added[len(end) :])

    def encode_answer(self, answer: str, stop: Sequence[str] = ()) -> np.ndarray:
        """Return [T] int32 token ids of a policy's turn, with an end of sequence unless a stop text ends it."""
        end = [] if answer.endswith(tuple(stop)) else [min(self.eos_ids)]
        return np.append(self._ids(answer), np.array(end, np.int32)).astype(np.int32)

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

    def _render(self, messages: Sequence[Message], tools: Tools, *, ask: bool) -> str:
        if not self.has_template:
            return "".join(message.content for message in messages)
        turns: list[Any] = [message.as_json() for message in messages]
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            text = self._chat.apply_chat_template(
                turns, tools=offered, add_generation_prompt=ask, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            # The latter two are errors of a template's expressions, and of a model with no template for this use.
            roles = ", ".join(message.role for message in messages)
            raise EpisodeError(f"the chat template refuses a conversation of {roles}: {error}") from error
        return str(text)


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
            is_ended = int(parts[-1][-1]) in tokenizer.eos_ids
            part = tokenizer.encode_reply(done, turn, tools, is_ended=is_ended)
        parts.append(part)
        masks.append(np.full(len(part), is_policy))
        done += turn
    return np.concatenate(parts), np.concatenate(masks)
