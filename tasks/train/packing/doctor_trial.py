"""Makes two tiny models and compares the layouts of rows on this machine's device: for `rollmill doctor`.

`python -m rollmill.tasks.train.packing.doctor_trial SETTINGS.json` reads the name of a FOLDER, `folder`, with a tokenizer in FOLDER/tokenizer. It
writes the models FOLDER/trainer and FOLDER/server, which have different random weights, and prints a line of JSON: LayoutTrial's fields.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from rollmill.tasks.train.config import StartModelRecipe
from rollmill.tasks.train.packing.layout_trial import compare_layouts
from rollmill.tasks.train.supervised import create_model, save_model


def main() -> None:
    """Write two tiny models with random weights and print how the layouts of rows compare: in bfloat16 on a GPU, in float32 on a CPU."""
    folder = Path(json.loads(Path(sys.argv[1]).read_text())["folder"])
    for seed, name in enumerate(("server", "trainer")):
        torch.manual_seed(seed)
        model = create_model(StartModelRecipe(steps=1, hidden_size=128), folder / "tokenizer")
        save_model(model, folder / "tokenizer", folder / name)
    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    trial = compare_layouts(model.eval(), torch.device(device), dtype)
    sys.stdout.write(json.dumps(asdict(trial)) + "\n")


if __name__ == "__main__":
    main()
