"""How soon is there a better policy? The quickstart's task, and a whole step of a 5M model, compared with trl's GRPOTrainer.

Everybody has the same start model, problems in the same order, group size, learning rate and objective, and runs as it does by
default on two cores: ours with Prefect, a vLLM server, a trainer and a run's folder; trl, which on a CPU has to generate in
its own process, with that process alone. A step is generating, scoring, training and bringing the weights to where tokens come
from, and its seconds are the median of a run's steps, the first few left out; those of the quickest are shown too. The 5M model
answers 64 prompts with 200 tokens in the mean and 512 at most.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import FILES, environment_of, run
from benchmarks.races.case import write_case
from benchmarks.races.ours import Race, race
from benchmarks.races.words import Words, save_model
from benchmarks.suite.process import ROOT
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import load
from rollmill.tasks.rollout.environment import Environment
from rollmill.tasks.rollout.environments.addition import Addition
from tests.stubs.prefect_server import prefect_server

TRL = "trl-1.16.0"
SETTLING = 3
"""Steps that do not count: the first evaluation runs meanwhile, and much is done for the first time."""
TARGETS = {"tiny_step_ratio_to_trl": 2.0, "speedup_vs_trl_5m": 1.5}
TINY_SCORER, SCORER = "rollmill.tasks.score.scorers.built_in:AdditionScorer", "benchmarks.races.crc:reward"
TRL_TINY = {"threads": 2, "rows_at_a_time": 256}
TRL_5M = {"threads": 2, "rows_at_a_time": 16}
"""What trl is quickest with here."""


def tiny(root: Path, steps: int) -> RunConfig:
    """The quickstart, evaluated and checkpointed at its end alone."""
    every = f"evaluate.every={steps}", f"checkpoint.every={steps}"
    return load("quickstart", (f"steps={steps}", f"store.root={root}", *every))


def uneven(root: Path, steps: int) -> RunConfig:
    """Whole steps of the 5M model, at a learning rate so small that they stay alike."""
    settings = {
        "steps": steps,
        "model": save_model(root / "model"),
        "store.root": root,
        "rollout.environment": "benchmarks.races.words:Words",
        "rollout.groups_per_step": 8,
        "rollout.group_size": 8,
        "rollout.max_in_flight": 64,
        "rollout.max_completion_tokens": 512,
        "score.scorer": SCORER,
        "train.lr": 1e-8,
        "checkpoint.every": steps,
        "serve.max_model_len": 640,
        "evaluate.every": "0",
        "start_model.steps": "0",
    }
    return load("quickstart", tuple(f"{name}={value}" for name, value in settings.items()))


def trl(
    root: Path, config: RunConfig, environment: Environment, scorer: str, settings: dict[str, Any]
) -> Race:
    """The same by trl."""
    case = write_case(root / "case.json", config, environment, scorer, settings)
    words = [environment_of(TRL), "-P", FILES / "trl_learns.py", ROOT, case, root / "trl"]
    return Race(**json.loads(run(words).splitlines()[-1]), parts_s={})


def compare(root: Path, steps: int, whole_steps: int) -> dict[str, tuple[Race, Race]]:
    """Ours and trl's, of both models."""
    small, large = root / "tiny", root / "5M"
    large.mkdir(parents=True)
    small.mkdir()
    config = tiny(small, steps)
    ours = race("tiny", config)  # which makes the start model where there is none
    races = {"tiny": (ours, trl(small, config, Addition(), TINY_SCORER, TRL_TINY))}
    config = uneven(large, whole_steps)
    return races | {"5M": (race("uneven", config), trl(large, config, Words(), SCORER, TRL_5M))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of the quickstart's task")
    parser.add_argument("--whole-steps", type=int, default=10, help="of the 5M model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder) / "prefect"):
        races = compare(Path(folder), given.steps, given.whole_steps)
    print(f"{'':12}{'median, s':>10}{'least':>8}{'tokens':>9}{'held out':>18}   parts of a step, s")
    for name, both in races.items():
        for who, each in zip(("ours", "trl"), both, strict=True):
            rewards = " -> ".join(f"{reward:.3f}" for reward in each.held_out)
            shown = ", ".join(f"{part} {seconds:.2f}" for part, seconds in each.parts_s.items())
            seconds = f"{each.median_s(SETTLING):10.3f}{each.least_s(SETTLING):8.3f}"
            print(f"{name + ' ' + who:12}{seconds}{each.tokens:9.0f}{rewards:>18}   {shown}")
    (tiny_ours, tiny_trl), (ours, peer) = races["tiny"], races["5M"]
    figures = {
        "tiny_step_ratio_to_trl": tiny_ours.median_s(SETTLING) / tiny_trl.median_s(SETTLING),
        "speedup_vs_trl_5m": peer.median_s(SETTLING) / ours.median_s(SETTLING),
        "start_reward": tiny_ours.held_out[0],
        "end_reward": tiny_ours.held_out[-1],
        "start_reward_trl": tiny_trl.held_out[0],
        "end_reward_trl": tiny_trl.held_out[-1],
        "tiny_step_s": tiny_ours.median_s(SETTLING),
        "tiny_step_trl_s": tiny_trl.median_s(SETTLING),
        "step_5m_s": ours.median_s(SETTLING),
        "step_5m_trl_s": peer.median_s(SETTLING),
        "tiny_step_least_s": tiny_ours.least_s(SETTLING),
        "tiny_step_trl_least_s": tiny_trl.least_s(SETTLING),
        "step_5m_least_s": ours.least_s(SETTLING),
        "step_5m_trl_least_s": peer.least_s(SETTLING),
    }
    ratio, speedup = (figures[name] for name in TARGETS)
    most, least = TARGETS.values()
    print(f"tiny_step_ratio_to_trl: {ratio:.2f}, target {most:g}: {'reached' if ratio <= most else 'MISSED'}")
    print(
        f"speedup_vs_trl_5m: {speedup:.2f}, target {least:g}: {'reached' if speedup >= least else 'MISSED'}"
    )
    parts = {"parts_s": {name: both[0].parts_s for name, both in races.items()}}
    print(json.dumps({"benchmark": "time_to_reward"} | figures | parts))


if __name__ == "__main__":
    main()
