"""A process that trains in one way, a step on each request: python -m benchmarks.trainer.worker WAY FOLDER SETTINGS.

For each line on its standard input it makes a step, and answers with its CPU seconds and peak memory as a line of JSON. Its
first step leaves the gradient in FOLDER/WAY.safetensors.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.trainer.bare import Bare
from benchmarks.trainer.ours import Ours
from benchmarks.trainer.peak import peak_mb, start_peak


def main() -> None:
    way, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    trainer = Bare(folder, settings) if way == "bare" else Ours(folder, settings)
    trainer.step()
    save_file(trainer.gradient, folder / f"{way}.safetensors")
    trainer.gradient.clear()
    start_peak()
    for _ in sys.stdin:
        started = time.process_time()
        trainer.step()
        spent = time.process_time() - started
        print(json.dumps({"cpu_s": spent, "peak_mb": peak_mb()}), flush=True)


if __name__ == "__main__":
    main()
