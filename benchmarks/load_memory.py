"""How much memory does each rank need to load a model under ZeRO-3?

A model of random weights in float32 is loaded by 2 and by 4 ranks. Memory is the most that is resident while it is loaded above what
was before it, of the rank that needs most. The bound is the model divided by the ranks, one decoder layer, and what loading a model
of a few kilobytes takes.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.peak import peak_mb, start_peak
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.partitioned_loading import load_trained
from rollmill.tasks.train.service.launch import launch_command
from rollmill.tasks.train.service.ranks import join_ranks

RANKS = (2, 4)
HIDDEN, LAYERS, VOCABULARY = 1024, 10, 8192


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> tuple[float, float]:
    """Write a model; returns its megabytes and those of a decoder layer."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100MB")
    layer = sum(each.numel() for each in model.model.layers[0].parameters())
    return 4e-6 * model.num_parameters(), 4e-6 * layer


def measure_rank(folder: Path) -> None:
    """Load the tiny model, then the large one, and write what each took."""
    torch.set_num_threads(1)
    ranks = join_ranks(300.0)
    config = TrainConfig(ranks=ranks.world_size, zero_stage=3, dtype="float32")
    taken = {}
    for name in ("tiny", "large"):
        dist.barrier()
        start_peak()
        before = peak_mb()
        model = load_trained(config, str(folder / name))
        taken[name] = peak_mb() - before
        del model
    (folder / f"{ranks.world_size}-{ranks.rank}.json").write_text(json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: Path, n_ranks: int) -> dict[str, float]:
    """Largest megabytes of a rank, by model."""
    command = [*launch_command(n_ranks), "-m", "benchmarks.load_memory", "--folder", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = [json.loads(each.read_text()) for each in folder.glob(f"{n_ranks}-*.json")]
    return {name: max(each[name] for each in found) for name in ("tiny", "large")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        measure_rank(given.folder)
        return
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "tiny", 32, 1, 64)
        model_mb, layer_mb = make_model(folder / "large", HIDDEN, LAYERS, VOCABULARY)
        for n_ranks in RANKS:
            taken = measure(folder, n_ranks)
            bound = model_mb / n_ranks + layer_mb + taken["tiny"]
            figures[f"{n_ranks} ranks"] = {
                "load_mb": taken["large"],
                "bound_mb": bound,
                "of_bound": taken["large"] / bound,
            }
            print(f"{n_ranks} ranks: {taken['large']:.0f} MB, bound {bound:.0f} MB", flush=True)
    largest = max(each["of_bound"] for each in figures.values())
    print(
        json.dumps(
            {"benchmark": "load_memory", "model_mb": model_mb, "layer_mb": layer_mb, "of_bound": largest}
            | figures
        )
    )


if __name__ == "__main__":
    main()
