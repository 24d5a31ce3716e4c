"""Makes a small start model by supervised training: `python -m tasks.train.supervised CONFIG.json`.

CONFIG.json is {"recipe": StartModelConfig, "seed", "corpus": Arrow file, "tokenizer": folder, "output": folder,
"progress": named pipe}.
The same configuration, seed and threads give the same model, byte for byte.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tasks.config import StageConfig
from tasks.train.config import StartModelConfig
from tasks.train.micro_batch import micro_batch
from tasks.train.policy import HeadPositions
from tasks.train.samples import Samples, arrays

_REPORT_EVERY = 100
_MAX_GRAD_NORM = 1.0


class SupervisedConfig(StageConfig):
    """What to train, from what, to where.

    Attributes:
        recipe: sizes of the model, steps, rates.
        seed: of the weights and of the examples' order.
        corpus: Arrow IPC file of token_ids and loss_mask.
        tokenizer: folder whose files go into the model's.
        output: the model's folder; it appears whole.
        progress: what gets the number of steps that are done, a line each time it is reported; empty: nothing does.
    """

    recipe: StartModelConfig
    seed: int
    corpus: str
    tokenizer: str
    output: str
    progress: str = ""


def main() -> None:
    """Train and save."""
    config = SupervisedConfig.model_validate_json(Path(sys.argv[1]).read_text())
    torch.set_num_threads(config.recipe.threads)
    torch.manual_seed(config.seed)
    model = new_model(config.recipe, Path(config.tokenizer))
    with Path(config.progress or os.devnull).open("w", buffering=1) as progress:
        examples = read_corpus(Path(config.corpus))
        train(model, config.recipe, examples, config.seed, lambda n_steps: progress.write(f"{n_steps}\n"))
    save(model, Path(config.tokenizer), Path(config.output))


def new_model(recipe: StartModelConfig, tokenizer: Path) -> PreTrainedModel:
    """A Qwen2 with random weights and an untied head, for a tokenizer."""
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    special = {name: settings.get(f"{name}_token") for name in ("bos", "eos", "pad")}
    ids: dict[str, Any] = {
        f"{name}_token_id": vocabulary.token_to_id(token) if token else None
        for name, token in special.items()
    }
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary.get_vocab_size(),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.max_position_embeddings,
            tie_word_embeddings=False,
            dtype="float32",
            **ids,
        )
    )


def train(
    model: PreTrainedModel,
    recipe: StartModelConfig,
    examples: Samples,
    seed: int,
    report: Callable[[int], object],
) -> None:
    """Minimize the mean negative log-probability of a batch's trained tokens, in nats; `report`: told the steps done."""
    head, device = HeadPositions(model), torch.device("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, fused=True)
    for step, rows in enumerate(_batches(len(examples.token_ids), recipe, seed)):
        batch = micro_batch(examples, rows, [""], device, "padded")
        head.positions = batch.positions
        logits = model(input_ids=batch.token_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits, batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _REPORT_EVERY == 0 or step == recipe.steps - 1:
            sys.stdout.write(f"step {step} of {recipe.steps}: loss {loss.item():.4f}\n")
            report(step + 1)


def learning_rate(recipe: StartModelConfig, step: int) -> float:
    """The rate of a step: rising linearly, constant, falling linearly to 0 over the last `decay_share` of the steps."""
    falling = recipe.decay_share * recipe.steps
    rising = min(1.0, (step + 1) / recipe.warmup_steps) if recipe.warmup_steps else 1.0
    return recipe.lr * min(rising, (recipe.steps - step) / falling if falling else 1.0)


def _batches(n_examples: int, recipe: StartModelConfig, seed: int) -> Iterator[list[int]]:
    """Row numbers of each step: random orders of the whole corpus, one after the other."""
    rng = np.random.default_rng(seed)
    order = np.empty(0, np.int64)
    for _ in range(recipe.steps):
        while len(order) < recipe.batch_size:
            order = np.concatenate([order, rng.permutation(n_examples)])
        rows, order = order[: recipe.batch_size], order[recipe.batch_size :]
        yield rows.tolist()


def read_corpus(path: Path) -> Samples:
    """The examples, as rows without advantage or sampler."""
    with pa.memory_map(str(path)) as file:
        rows = pa.ipc.open_file(file).read_all()
    return Samples.known(arrays(rows["token_ids"]), arrays(rows["loss_mask"]))


def save(model: PreTrainedModel, tokenizer: Path, output: Path) -> None:
    """Write weights, configuration and tokenizer; the folder appears whole."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        unfinished = Path(scratch) / "model"
        model.save_pretrained(unfinished)
        for file in tokenizer.iterdir():
            shutil.copy(file, unfinished / file.name)
        unfinished.rename(output)


if __name__ == "__main__":
    main()
