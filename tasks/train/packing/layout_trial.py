"""Makes two tiny models and compares packed with padded rows on this machine's device: for `rollmill doctor`.

`python -m rollmill.tasks.train.packing.layout_trial SETTINGS.json` reads the name of a FOLDER, `folder`, with a tokenizer in FOLDER/tokenizer. It
writes the models FOLDER/trainer and FOLDER/server, which have different random weights, and prints a line of JSON: LayoutTrial's fields.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmill.tasks.train.config import StartModelRecipe, TrainConfig
from rollmill.tasks.train.engine.policy_model import DTYPES, PolicyModel
from rollmill.tasks.train.packing.packer import Packer, choose_layout
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.supervised import create_model, save_model


@dataclass(frozen=True, slots=True)
class LayoutTrial:
    """Log-probabilities and gradients of varlen rows against padded ones, on one device.

    Attributes:
        device: that computed them.
        dtype: number format of the weights.
        logprobs: largest difference of a token's log-probability, in nats.
        gradient: norm of the difference of all gradients, relative to their norm.
    """

    device: str
    dtype: str
    logprobs: float
    gradient: float


def main() -> None:
    """Write the two models and print the comparison."""
    folder = Path(json.loads(Path(sys.argv[1]).read_text())["folder"])
    for seed, name in enumerate(("trainer", "server")):
        torch.manual_seed(seed)
        recipe = StartModelRecipe(steps=1, hidden_size=128)
        save_model(create_model(recipe, folder / "tokenizer"), folder / "tokenizer", folder / name)
    sys.stdout.write(json.dumps(asdict(compare_layouts(folder / "trainer"))) + "\n")


def compare_layouts(model: Path) -> LayoutTrial:
    """Run rows of uneven length forward and backward in both layouts, in bfloat16 on a GPU and in float32 on a CPU."""
    device, dtype = (
        (torch.device("cuda"), "bfloat16") if torch.cuda.is_available() else (torch.device("cpu"), "float32")
    )
    varlen, padded = (_run(model, layout, device, dtype) for layout in ("varlen", "padded"))
    difference = float((varlen[0] - padded[0]).abs().max())
    relative = float((varlen[1] - padded[1]).norm() / padded[1].norm())
    return LayoutTrial(str(device), dtype, difference, relative)


def _run(folder: Path, layout: str, device: torch.device, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [N] log-probabilities of the trained tokens and all gradients of their sum, in float32 on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval().to(device)
    config = TrainConfig.model_validate({"layout": layout, "dtype": dtype, "gradient_checkpointing": False})
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, model.config.vocab_size, n) for n in (5, 40, 17, 90)]
    samples = Samples.from_tokens(rows, [np.arange(len(row)) >= 2 for row in rows])
    packer = Packer(config, choose_layout(model, config, device), device)
    batch = packer.micro_batch(samples, list(range(len(rows))), [""])
    policy = PolicyModel(model, is_partitioned=False, head_dtype="float32")
    logprobs, _ = policy.values(model, batch, entropy_gradient=False)
    logprobs.sum().backward()
    gradient = torch.cat(
        [each.grad.float().flatten() for each in model.parameters() if each.grad is not None]
    )
    in_order = torch.cat([logprobs.detach()[batch.rows == row] for row in range(len(rows))])
    return in_order.float().cpu(), gradient.cpu()


if __name__ == "__main__":
    main()
