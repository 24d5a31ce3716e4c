"""What distillation learns, and what a second student costs: figures of docs/lab/learning.md.

The teacher is the quickstart's policy of seed 0. Students start from each seed's start model, and learn on-policy, or from rollouts
that this start model sampled and to which the teacher's log-probabilities are added. Reported are held-out rewards, the CPU seconds of
each command, and how many trajectories have the teacher's log-probabilities.
"""

import argparse
import json

from benchmarks.studies.commands import Commands, commands_of

STORED = ("--scores", "addition@1", "--set", "train.kl.reference=stored", "--set", "train.kl.teacher=teacher")
ON_POLICY = ("quickstart+distill", "--set", "train.kl.model=models/teacher")
REWARDS = ("--set", "score.advantage=mean", "--set", "score.train_without_spread=true")
"""Settings of a student that learns from rewards too."""


def distill(commands: Commands, seeds: int, steps: int) -> None:
    """Make the teacher, then all students."""
    commands.run("teacher", "run", "quickstart", "--name", "teacher")
    commands.run("export", "export-policy", "teacher", "models/teacher")
    for seed in range(seeds):
        length = ("--set", f"steps={steps}", "--set", f"seed={seed}")
        sampled, stored, on_policy = f"sampled-{seed}", f"stored-{seed}", f"on-policy-{seed}"
        commands.run(sampled, "collect", "quickstart", "--name", sampled, *length)
        commands.run(f"annotate-{seed}", "annotate", sampled, "--teacher", "models/teacher")
        retrain = ("retrain", "quickstart+distill", "--from", sampled, "--name", stored)
        commands.run(stored, *retrain, *STORED, *length)
        commands.run(on_policy, "run", *ON_POLICY, "--name", on_policy, *length)


def teach_again(commands: Commands, steps: int) -> None:
    """Make a second student of the same rollouts, and students of rewards and teacher."""
    length = ("--set", f"steps={steps}")
    retrain = ("retrain", "quickstart+distill", "--from", "sampled-0", *STORED, *length)
    commands.run("annotate-again", "annotate", "sampled-0", "--teacher", "models/teacher")
    commands.run("second", *retrain, "--name", "second", "--set", "seed=1")
    commands.run("mixed", *retrain, "--name", "mixed", "--set", "seed=0", *REWARDS)
    run = ("run", *ON_POLICY, "--name", "mixed-on-policy", *length, "--set", "seed=0")
    commands.run("mixed-on-policy", *run, *REWARDS, "--set", "train.kl.coef=0.3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    with commands_of(parser) as (commands, words):
        distill(commands, words.seeds, words.steps)
        teach_again(commands, words.steps)
        students = [f"{kind}-{seed}" for kind in ("on-policy", "stored") for seed in range(words.seeds)]
        runs = ["teacher", *students, "second", "mixed", "mixed-on-policy"]
        annotated = commands.scan("sampled-0", "logprobs", ["trajectory_id"]).collect().height
        rewards = {run: commands.held_out(run) for run in runs}
        figures = {"rewards": rewards, "cpu_s": commands.cpu_s, "annotated": annotated}
        print(json.dumps({"benchmark": "distillation"} | figures))


if __name__ == "__main__":
    main()
