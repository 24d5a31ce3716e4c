"""What does a large vocabulary cost in memory? A step's forward and backward pass at V = 151,936, in chunks and whole.

4 rows of 513 tokens with 2,048 trained ones through a model of two layers whose head is nearly all of it: whole, their logits are
1.2 GB. Memory is the most that is resident during the pass above what was before it, of a process by itself; the head's
gradient, 39 MB, is part of it.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.trainer.peak import peak_mb, start_peak
from rollmill.tasks.train.engine.policy_model import PolicyModel
from rollmill.tasks.train.packing.micro_batch import build_micro_batch
from rollmill.tasks.train.samples import Samples

VOCABULARY, HIDDEN, N_ROWS, N_TOKENS = 151_936, 64, 4, 512
WHOLE_MIB, CHUNKS_MIB = 1 << 20, (512, 64)
Figures = dict[str, float]


def measure(chunk_mib: int) -> Figures:
    """Megabytes and CPU seconds of one pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    policy = PolicyModel(model, is_partitioned=False, chunk_bytes=chunk_mib << 20)
    rows = list(np.random.default_rng(0).integers(0, VOCABULARY, (N_ROWS, 1 + N_TOKENS)))
    samples = Samples.from_tokens(rows, [np.arange(1 + N_TOKENS) > 0] * N_ROWS)
    batch = build_micro_batch(samples, list(range(N_ROWS)), [""], torch.device("cpu"), "padded")
    start_peak()
    before, started = peak_mb(), time.process_time()
    logprobs, _ = policy.values(model, batch, entropy_gradient=False)
    logprobs.mean().backward()
    return {"head_mb": peak_mb() - before, "cpu_s": time.process_time() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunk-mib", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.chunk_mib:
        print(json.dumps(measure(given.chunk_mib)))
        return
    found: dict[str, Figures] = {}
    for chunk_mib in (WHOLE_MIB, *CHUNKS_MIB):
        words = [sys.executable, "-m", "benchmarks.head_memory", "--chunk-mib", str(chunk_mib)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        name = "whole" if chunk_mib == WHOLE_MIB else f"{chunk_mib} MiB"
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:10}{found[name]['head_mb']:10.0f} MB{found[name]['cpu_s']:10.1f} CPU s", flush=True)
    print(json.dumps({"benchmark": "head_memory", "chunks": found}))


if __name__ == "__main__":
    main()
