"""How long is a step when the servers generate while the trainer works? The whole loop over services that sleep.

Prefect, `post-train`, the data sets, the clients and the sync are the product's; trainer and vLLM server are attached
to, and answer after the time that training, sending the weights and one completion would take. Strictly on-policy
(`rollout.max_staleness: 0`) a step is generation, then training, then sync. One step behind (1), the next step's
generation runs meanwhile, and a step is the longer of generation, and training with its sync.
"""

import asyncio
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.rollout.chat_tokenizer import save_character_tokenizer
from tests.stubs.prefect_server import prefect_server
from tests.stubs.toy_settings import validate_toy
from tests.stubs.trainer import StubTrainer
from tests.stubs.vllm_server import StubVllmServer

STEPS = 8
SETTLING_STEPS = 2
"""Steps at the beginning that are not counted: nothing runs concurrently with the first one."""
GROUPS, GROUP_SIZE, SLOTS = 8, 4, 8
ROLLOUT_S, SEND_S = 0.5, 0.1
GENERATION_S = GROUPS * GROUP_SIZE / SLOTS * ROLLOUT_S
TRAINING_S = (1.0, 2.0, 3.0)


class StepTime(NamedTuple):
    """Seconds of a step, median over the counted ones, and what they would be without any overhead."""

    step_s: float
    ideal_s: float


def measure(folder: Path, max_staleness: int, train_s: float) -> StepTime:
    """Run post-train over stubs; a step is from one training step's start to the next one's."""
    model = save_character_tokenizer(folder / "model")
    (model / "config.json").write_text("{}")
    trainer, server = StubTrainer(train_s, SEND_S), StubVllmServer(model, ROLLOUT_S)
    trainer_port, server_port = free_port(), free_port()
    controls = [trainer.serve(trainer_port), server.serve(server_port)]
    os.environ["ROLLMILL_TRAINER_TOKEN"] = trainer.token
    try:
        config = settings(folder, max_staleness, trainer_port, server_port)
        from rollmill.flows.post_train import post_train  # Prefect reads its settings when it is imported

        asyncio.run(post_train(f"staleness-{max_staleness}-{train_s:g}", config))
    finally:
        for control in controls:
            control.stop()
    steps_s = [after - before for before, after in pairwise(trainer.started_s)][SETTLING_STEPS:]
    update_s = train_s + SEND_S
    ideal_s = max(GENERATION_S, update_s) if max_staleness else GENERATION_S + update_s
    return StepTime(statistics.median(steps_s), ideal_s)


def settings(folder: Path, max_staleness: int, trainer_port: int, server_port: int) -> RunConfig:
    """A run that attaches to the stubs."""
    return validate_toy(
        {
            "steps": STEPS,
            "model": str(folder / "model"),
            "rollout": {
                "groups_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_in_flight": SLOTS,
                "max_staleness": max_staleness,
            },
            "serve": {"urls": [f"http://127.0.0.1:{server_port}"]},
            "train": {"url": f"http://127.0.0.1:{trainer_port}"},
            "evaluate": {"every": STEPS, "n_prompts": 1},
            "store": {"root": str(folder / "runs")},
        }
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name, prefect_server(Path(name) / "prefect"):
        times = {
            (max_staleness, train_s): measure(
                Path(name) / f"{max_staleness}-{train_s:g}", max_staleness, train_s
            )
            for train_s in TRAINING_S
            for max_staleness in (0, 1)
        }
    print(
        f"generation {GENERATION_S:g} s, sync {SEND_S:g} s; seconds of a step, and those without any overhead"
    )
    print(f"{'training':>9} {'on-policy':>18} {'one step behind':>18}")
    for train_s in TRAINING_S:
        cells = [f"{times[k, train_s].step_s:8.2f} ({times[k, train_s].ideal_s:.2f})" for k in (0, 1)]
        print(f"{train_s:7g} s {cells[0]:>18} {cells[1]:>18}")
    figures = {
        f"{name}_train_{train_s:g}s": round(times[k, train_s].step_s, 3)
        for train_s in TRAINING_S
        for k, name in ((0, "on_policy"), (1, "one_behind"))
    }
    print(json.dumps({"benchmark": "staleness", "generation_s": GENERATION_S, "sync_s": SEND_S} | figures))


if __name__ == "__main__":
    main()
