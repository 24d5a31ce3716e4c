"""Text to token ids and back, in the flow's process, without a deep-learning framework."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tasks.errors import ConfigError, EpisodeError
from tasks.rollout.environment import Message

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>[]()|?!.,:;"
PAD, EOS = "<pad>", "<eos>"


class ChatTokenizer:
    """The model's tokenizer, and its chat template when it has one."""

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: frozenset[int], template: str, specials: dict[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._specials = specials
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(template) if template else None

    @classmethod
    def load(cls, model: Path) -> "ChatTokenizer":
        """Read tokenizer.json, tokenizer_config.json and the end-of-sequence ids of a model folder.

        Raises:
            ConfigError: the folder lacks one of them.
        """
        try:
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            settings = json.loads((model / "tokenizer_config.json").read_text())
        except Exception as error:  # tokenizers raises bare Exception for a missing or broken file
            raise ConfigError(
                "model", str(model), f"not a model folder with a fast tokenizer ({error})"
            ) from error
        specials = {name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
        template_file = model / "chat_template.jinja"
        template = (
            template_file.read_text() if template_file.exists() else settings.get("chat_template") or ""
        )
        return cls(tokenizer, _eos_ids(model, tokenizer, specials), template, specials)

    @property
    def has_template(self) -> bool:
        """True when conversations are written by a chat template, False when their texts are joined."""
        return self._template is not None

    def encode(self, messages: Sequence[Message]) -> np.ndarray:
        """[T] int32 token ids that ask the policy for its next message."""
        return self._ids(self._render(messages, ask=True))

    def encode_reply(self, messages: Sequence[Message], reply: Sequence[Message]) -> np.ndarray:
        """[T] int32 token ids that the environment's reply adds after the policy's last token.

        Raises:
            EpisodeError: the chat template changes what it wrote before.
        """
        before, after = self._render(messages, ask=False), self._render((*messages, *reply), ask=True)
        if not after.startswith(before):
            raise EpisodeError(
                "the chat template rewrites earlier turns, so turns cannot be joined by token ids"
            )
        return self._ids(after[len(before) :])

    def encode_answer(self, answer: str) -> np.ndarray:
        """[T] int32 token ids of an answer of the policy, with the end of the sequence."""
        return np.append(self._ids(answer), np.int32(min(self.eos_ids))).astype(np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        if self._template is None:
            return "".join(message.content for message in messages)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self._template.render(messages=turns, add_generation_prompt=ask, **self._specials)


def _text(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _eos_ids(model: Path, tokenizer: Tokenizer, specials: dict[str, str]) -> frozenset[int]:
    file = model / "generation_config.json"
    declared = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    ids = declared if isinstance(declared, list) else [declared]
    ids = [*ids, tokenizer.token_to_id(specials.get("eos_token", ""))]
    return frozenset(int(each) for each in ids if each is not None)


def save_character_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of 57 tokens, two specials and one for each character; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder
