"""What retraining on stored rollouts learns under another reward: figures of docs/lab/retraining.md.

The quickstart's rollouts are scored again by `Estimate` of docs/how-to/rescoring.md, which rewards near and short answers. New policies
train on those of its first ten steps, or of all steps. Held-out rewards are those under `estimate@1`.
"""

import argparse
import json
import re

import polars as pl

from benchmarks.studies.commands import ROOT, Commands, Means, commands_of, mean_by_version

PAGE = ROOT / "docs" / "how-to" / "rescoring.md"
SCORER = re.compile(r"```python\n(.*?class Estimate:.*?)```", re.DOTALL)
OFF_POLICY = ("--set", "train.loss=cispo", "--set", "train.clip_low=1", "--set", "train.clip_high=1")
FIRST_STEPS = ("--where", "step < 10")


def retrain(commands: Commands, seed: int, steps: int) -> None:
    """Train the quickstart of a seed, score it again, and train on its first ten steps and on all of them."""
    source = f"quickstart-{seed}"
    commands.run(source, "run", "quickstart", "--name", source, "--set", f"seed={seed}")
    commands.run(f"rescore-{seed}", "rescore", source, "--scorer", "rewards:Estimate", "--evaluations")
    length = ("--set", f"steps={steps}", "--set", "evaluate.every=10", "--set", f"seed={seed}")
    for name, chosen in (("first", FIRST_STEPS), ("all", ())):
        run = f"{name}-{seed}"
        training = ("retrain", "quickstart", "--from", source, "--scores", "estimate@1", "--name", run)
        commands.run(run, *training, "--set", "score.scorer=rewards:Estimate", *OFF_POLICY, *chosen, *length)


def tokens_of(commands: Commands, run: str) -> Means:
    """Return the mean number of tokens of the sampled held-out answers of each evaluated version."""
    answers = commands.scan(run, "evaluations", ["step", "greedy", "n_completion_tokens"])
    mean = answers.filter(~pl.col("greedy")).group_by("step").agg(pl.col("n_completion_tokens").mean())
    return dict(mean.sort("step").collect().iter_rows())


def rescored(commands: Commands, run: str) -> dict[str, Means]:
    """Return the mean held-out reward of each version of the quickstart under `estimate@1`, sampled and greedy."""
    keys = commands.scan(run, "evaluations", ["trajectory_id", "step", "greedy"])
    scores = commands.scan(run, "evaluation_scores", ["trajectory_id", "scorer", "reward"])
    return mean_by_version(keys.join(scores.filter(pl.col("scorer") == "estimate"), on="trajectory_id"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    with commands_of(parser) as (commands, words):
        scorer = SCORER.search(PAGE.read_text())
        assert scorer, f"{PAGE} has no Estimate"
        (commands.folder / "rewards.py").write_text(scorer[1])
        figures = {}
        for seed in range(words.seeds):
            retrain(commands, seed, words.steps)
            source = f"quickstart-{seed}"
            figures[source] = rescored(commands, source) | {"tokens": tokens_of(commands, source)}
            for run in (f"first-{seed}", f"all-{seed}"):
                figures[run] = {**commands.held_out(run), "tokens": tokens_of(commands, run)}
        print(json.dumps({"benchmark": "shorter_answers", "runs": figures}))


if __name__ == "__main__":
    main()
