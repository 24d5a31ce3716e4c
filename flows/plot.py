"""The learning curve of a run as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import polars as pl

from flows.inspection import held_out
from tasks.store.layout import RunFolder
from tasks.store.reader import scan


def plot_learning_curve(folder: RunFolder) -> Path:
    """Draw reward by step, held-out reward and accuracy, and completion length; returns the PNG's path."""
    steps = (
        scan(folder, "groups", ["step", "reward_mean", "tokens_mean"])
        .group_by("step")
        .agg(pl.col("reward_mean").drop_nans().mean(), pl.col("tokens_mean").drop_nans().mean())
        .sort("step")
        .collect()
    )
    evaluations = held_out(folder)
    versions = [each["step"] for each in evaluations]
    figure, (reward, length) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(3, 1))
    reward.plot(steps["step"], steps["reward_mean"], color="tab:gray", label="training reward")
    reward.plot(versions, [each["reward"] for each in evaluations], "o-", label="held-out reward, sampled")
    reward.plot(
        versions, [each["greedy_accuracy"] for each in evaluations], "s--", label="held-out accuracy, greedy"
    )
    reward.set(ylabel="reward, accuracy", ylim=(0, 1.02))
    reward.legend(loc="lower right")
    reward.grid(alpha=0.3)
    length.plot(steps["step"], steps["tokens_mean"], color="tab:green")
    length.set(xlabel="step (policy version)", ylabel="tokens")
    length.grid(alpha=0.3)
    figure.tight_layout()
    path = folder.local / "learning_curve.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
