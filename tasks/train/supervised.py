"""Makes a small start model by supervised training: `python -m rollmill.tasks.train.supervised CONFIG.json`.

CONFIG.json is a SupervisedConfig. The program prints "step N of M: loss X" lines, N from 0.
The same configuration, seed and threads give the same model, byte for byte.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollmill.tasks.config import StageConfig
from rollmill.tasks.store.filesystem import publish_path
from rollmill.tasks.train.config import START_MODEL_HEAD_SIZE, StartModelRecipe
from rollmill.tasks.train.engine.policy_model import HeadPositions
from rollmill.tasks.train.packing.micro_batch import build_micro_batch
from rollmill.tasks.train.samples import Samples, split_rows

_REPORT_EVERY = 100
_MAX_GRAD_NORM = 1.0


class SupervisedConfig(StageConfig):
    """Settings of the supervised training.

    Attributes:
        recipe: sizes of the model, number of steps, learning rates.
        seed: seed of the initial weights and of the examples' order.
        corpus: Arrow IPC file with the columns token_ids and loss_mask.
        tokenizer: folder of the tokenizer, whose files are copied into the model's folder.
        output: path of the model's folder; it appears under this name only once complete.
    """

    recipe: StartModelRecipe
    seed: int
    corpus: str
    tokenizer: str
    output: str


def main() -> None:
    """Train the start model of the configuration file in the first command-line argument, and save it."""
    config = SupervisedConfig.model_validate_json(Path(sys.argv[1]).read_text())
    # More threads spin on each other where cores are shared.
    torch.set_num_threads(1)
    # With one seed and one number of threads the model is the same byte for byte.
    torch.manual_seed(config.seed)
    model = create_model(config.recipe, Path(config.tokenizer))
    train(model, config.recipe, read_corpus(Path(config.corpus)), config.seed)
    save_model(model, Path(config.tokenizer), Path(config.output))


def create_model(recipe: StartModelRecipe, tokenizer: Path) -> PreTrainedModel:
    """Create a Qwen2 with random weights and an untied head, for a tokenizer."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    special = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "pad")}
    ids: dict[str, Any] = {
        f"{name}_token_id": vocabulary.token_to_id(token) if token else None
        for name, token in special.items()
    }
    heads = recipe.hidden_size // START_MODEL_HEAD_SIZE
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary.get_vocab_size(),
            hidden_size=recipe.hidden_size,
            intermediate_size=2 * recipe.hidden_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=recipe.max_position_embeddings,
            tie_word_embeddings=False,
            dtype="float32",
            **ids,
        )
    )


def train(model: PreTrainedModel, recipe: StartModelRecipe, examples: Samples, seed: int) -> None:
    """Train a model with AdamW to minimize the mean negative log-probability of trained tokens; prints the loss in nats."""
    head, device = HeadPositions(model), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)
    for step, rows in enumerate(_batches(len(examples.token_ids), recipe, seed)):
        batch = build_micro_batch(examples, rows, [""], device, "padded")
        head.positions = batch.positions
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = start_model_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _REPORT_EVERY == 0 or step == recipe.steps - 1:
            sys.stdout.write(f"step {step} of {recipe.steps}: loss {loss.item():.4f}\n")


def start_model_rate(recipe: StartModelRecipe, step: int) -> float:
    """Learning rate of a step: linear warm-up, constant, linear decay to 0 over the last `decay_share` of the steps."""
    falling = recipe.decay_share * recipe.steps
    rising = min(1.0, (step + 1) / recipe.warmup_steps) if recipe.warmup_steps else 1.0
    return recipe.lr * min(rising, (recipe.steps - step) / falling if falling else 1.0)


def _batches(n_examples: int, recipe: StartModelRecipe, seed: int) -> Iterator[list[int]]:
    """Yield the row numbers of each step's batch, from random permutations of the corpus, one after another."""
    rng = np.random.default_rng(seed)
    order = np.empty(0, np.int64)
    for _ in range(recipe.steps):
        # A corpus that is smaller than a batch occurs in it several times.
        while len(order) < recipe.batch_size:
            order = np.concatenate([order, rng.permutation(n_examples)])
        rows, order = order[: recipe.batch_size], order[recipe.batch_size :]
        yield rows.tolist()


def read_corpus(path: Path) -> Samples:
    """Examples of the corpus, as rows without advantage or sampler."""
    with pa.memory_map(str(path)) as file:
        rows = pa.ipc.open_file(file).read_all()
    return Samples.from_tokens(split_rows(rows["token_ids"]), split_rows(rows["loss_mask"]))


def save_model(model: PreTrainedModel, tokenizer: Path, output: Path) -> None:
    """Write weights, configuration and tokenizer into a folder, which appears at `output` only once complete."""
    with publish_path(output) as staged:
        model.save_pretrained(staged)
        for file in tokenizer.iterdir():
            shutil.copy(file, staged / file.name)


if __name__ == "__main__":
    main()
