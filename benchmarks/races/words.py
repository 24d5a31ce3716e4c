"""A task whose answers are long and uneven, and a model that gives them: 5M parameters, lengths geometric.

The model's next token is nearly any of its vocabulary, but the end of the sequence comes with the probability
1 / END_AFTER_TOKENS at every place: one channel of the residual stream, which no layer writes to, is the same everywhere,
and the head reads the end's logit from it. Answers of at most 512 tokens then have 200 in the mean.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.lengths import N_PROMPT_TOKENS
from benchmarks.trainer.work import SIZES
from rollmill.tasks.rollout.chat_tokenizer import CHARACTERS, save_character_tokenizer
from rollmill.tasks.rollout.environment import Episode, Example, Message, SingleTurn, Split

N_EXAMPLES = 1000
END_AFTER_TOKENS = 224.0
PAD_ID, EOS_ID = 0, 1
STEADY_CHANNEL = 0


class Words:
    """Prompts of 64 random characters, a token each."""

    name = "words"
    tools: Sequence[Mapping[str, object]] = ()
    stop: Sequence[str] = ()

    def size(self, split: Split) -> int:
        return N_EXAMPLES

    async def example(self, split: Split, index: int) -> Example:
        chosen = np.random.default_rng([index, split == "train"]).choice(list(CHARACTERS), N_PROMPT_TOKENS)
        return Example(example_id=f"{split}-{index}", content={"problem": "".join(chosen)})

    def episode(self, example: Example, seed: int) -> Episode:
        return SingleTurn((Message("user", str(example.content["problem"])),))


def save_model(folder: Path, seed: int = 0) -> Path:
    """Write the model with a tokenizer of as many tokens; returns the folder."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **SIZES["5M"],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        _end_now_and_then(model, math.log(config.vocab_size / END_AFTER_TOKENS))
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    save_character_tokenizer(folder)
    _fill(folder / "tokenizer.json", config.vocab_size)
    return folder


def _end_now_and_then(model: Qwen2ForCausalLM, logit: float) -> None:
    """Give the end of the sequence this logit at every position; other logits are near 0."""
    body = model.model
    body.embed_tokens.weight[:, STEADY_CHANNEL] = 1.0
    for layer in body.layers:
        layer.self_attn.o_proj.weight[STEADY_CHANNEL] = 0.0
        layer.mlp.down_proj.weight[STEADY_CHANNEL] = 0.0
    ids = torch.randint(2, model.config.vocab_size, (8, 256))
    steady = body(input_ids=ids).last_hidden_state[..., STEADY_CHANNEL].mean()
    model.lm_head.weight[:, STEADY_CHANNEL] = 0.0
    model.lm_head.weight[PAD_ID] = 0.0
    model.lm_head.weight[EOS_ID] = 0.0
    model.lm_head.weight[EOS_ID, STEADY_CHANNEL] = logit / steady


def _fill(file: Path, size: int) -> None:
    """Give a tokenizer further tokens, which no text has, up to a size."""
    settings = json.loads(file.read_text())
    vocabulary: dict[str, int] = settings["model"]["vocab"]
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), size)}
    file.write_text(json.dumps(settings))
