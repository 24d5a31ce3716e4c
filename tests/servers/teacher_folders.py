"""Model folders of teachers, without a model: its settings, its tokenizer and a file in place of its weights."""

import json
from pathlib import Path

from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer

SETTINGS = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096}


def make_teacher(folder: Path, weights: bytes = b"weights", **settings: object) -> Path:
    """Write a teacher's folder; returns it."""
    save_character_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "model.safetensors").write_bytes(weights)
    return folder
