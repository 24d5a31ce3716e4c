import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollmill.tasks.store.warmup_text import write_warmup_text
from rollmill.tasks.train.config import StartModelRecipe
from rollmill.tasks.train.supervised import start_model_rate

VOCABULARY = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}


@pytest.mark.service
def test_start_model_learns_and_is_the_same_each_time(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "<pad>"}}
    (tokenizer / "tokenizer.json").write_text(json.dumps(words | {"added_tokens": []}))
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<eos>", "pad_token": "<pad>"}')
    write_warmup_text(
        tmp_path / "corpus.arrow",
        [np.array([2, 3, 4, 1], np.int32)] * 40,
        [np.array([False, False, True, True])] * 40,
    )
    recipe = StartModelRecipe(layers=2, hidden_size=32, steps=30, batch_size=8, warmup_steps=0)

    def made(name: str) -> tuple[bytes, str]:
        job = {"recipe": recipe.model_dump(), "seed": 3, "corpus": str(tmp_path / "corpus.arrow")}
        job |= {"tokenizer": str(tokenizer), "output": str(tmp_path / name)}
        (tmp_path / "job.json").write_text(json.dumps(job))
        words = [sys.executable, "-m", "rollmill.tasks.train.supervised", str(tmp_path / "job.json")]
        printed = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
        return (tmp_path / name / "model.safetensors").read_bytes(), printed

    weights, printed = made("one")

    assert made("two")[0] == weights
    assert re.findall(r"(?m)^step (\d+) of 30", printed) == ["0", "29"]
    assert float(re.findall(r"loss (\S+)", printed)[-1]) < 0.5
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["tie_word_embeddings"]) == (5, 1, False)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {file.name for file in (tmp_path / "one").iterdir()}
    assert {file.name for file in tmp_path.iterdir() if file.is_dir()} == {"tokenizer", "one", "two"}


def test_rate_rises_linearly_over_the_first_steps() -> None:
    recipe = StartModelRecipe(layers=2, hidden_size=32, steps=10, decay_share=0.0, lr=1.0, warmup_steps=4)

    assert [start_model_rate(recipe, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_rate_falls_linearly_over_the_last_share_of_the_steps() -> None:
    recipe = StartModelRecipe(layers=2, hidden_size=32, steps=10, decay_share=0.4, lr=1.0, warmup_steps=0)

    assert [start_model_rate(recipe, step) for step in range(10)] == [1.0] * 7 + [0.75, 0.5, 0.25]
    assert start_model_rate(recipe.model_copy(update={"decay_share": 0.0}), 9) == 1.0
