"""Tiny models of published families: random weights, and tokenizers and chat templates of the shape that the family has."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chat_templates
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WORDS = [
    "What is the price of a fig and an apple?",
    "The answer is a number.",
    "user system assistant tool",
] * 4
"""What merges are learned from; all other text is written byte by byte."""

N_MERGES = 40
EMBEDDED = 512
"""Rows of the embedding: more than the tokenizer has tokens, as in published models."""

QWEN_SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


def save_byte_tokenizer(
    folder: Path,
    *,
    specials: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    split: str = QWEN_SPLIT,
    begins: str = "",
    **settings: Any,
) -> Path:
    """Write a byte-level BPE as Qwen and Llama 3 have it, special tokens last; returns the folder.

    `begins` is a token that the tokenizer itself puts before a text, unless it is asked not to.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pieces]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + N_MERGES, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begins} $A", special_tokens=[(begins, tokenizer.token_to_id(begins))]
        )
    ends = {"eos_token": specials[-1], "pad_token": specials[0]}
    return _save(folder, tokenizer, {"tokenizer_class": "Qwen2Tokenizer"} | ends | settings)


def save_piece_tokenizer(folder: Path, *, specials: Sequence[str], **settings: Any) -> Path:
    """Write a BPE over characters that falls back to bytes, special tokens first, as Gemma has it; returns the folder."""
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [each for each in map(chr, range(32, 127)) if each != " "] + ["▁"]
    merges = [("▁", "a"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n")]
    vocabulary = {token: i for i, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in specials])
    bos = settings["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return _save(folder, tokenizer, settings)


def _save(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def _save_qwen2(folder: Path) -> Path:
    return save_byte_tokenizer(folder, chat_template=chat_templates.QWEN2)


def _save_qwen3(folder: Path) -> Path:
    return save_byte_tokenizer(folder, chat_template=chat_templates.QWEN3)


def _save_llama(folder: Path) -> Path:
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0]}
    template = {"chat_template": chat_templates.LLAMA3}
    return save_byte_tokenizer(
        folder, specials=names, split=LLAMA_SPLIT, begins=names[0], **settings, **template
    )


def _save_mistral(folder: Path) -> Path:
    tokens = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    return save_piece_tokenizer(
        folder,
        specials=("<unk>", "<s>", "</s>", *tokens),
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_templates.MISTRAL,
    )


def _save_gemma(folder: Path) -> Path:
    return save_piece_tokenizer(
        folder,
        specials=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        tokenizer_class="GemmaTokenizer",
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_templates.GEMMA,
    )


class Family(NamedTuple):
    """How a tiny model of a family is made: its model type, settings on top of SIZES, and its tokenizer."""

    model_type: str
    settings: Mapping[str, Any]
    save_tokenizer: Callable[[Path], Path]


SIZES: Mapping[str, Any] = {
    "vocab_size": EMBEDDED,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's attention takes on a CPU; not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

FAMILIES: Mapping[str, Family] = {
    # Qwen2's heads have the size of hidden_size / num_attention_heads.
    "qwen2": Family("qwen2", {"hidden_size": 128, "tie_word_embeddings": True}, _save_qwen2),
    "qwen3": Family("qwen3", {"tie_word_embeddings": False}, _save_qwen3),
    "llama": Family("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}, _save_llama),
    "llama-tied": Family("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}, _save_llama),
    "mistral": Family("mistral", {"sliding_window": 32, "tie_word_embeddings": False}, _save_mistral),
    "gemma2": Family("gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 32}, _save_gemma),
    "gemma3": Family("gemma3_text", {"sliding_window": 32, "query_pre_attn_scalar": 32}, _save_gemma),
    "qwen3-moe": Family("qwen3_moe", EXPERTS | {"tie_word_embeddings": False}, _save_qwen3),
}


def save_tiny_family(folder: Path, name: str) -> Path:
    """Write a tiny model of a family, in Hugging Face format with random weights; returns the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    family = FAMILIES[name]
    family.save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **SIZES | ids | dict(family.settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
