"""Rollout rows as candidates, and verdicts as rows of `scores`."""

import json
from collections.abc import Sequence

from tasks.score.candidate import CandidateText
from tasks.score.verdict import Verdict
from tasks.store.rows import Rows
from tasks.store.schemas import batch_of

_READ = ["trajectory_id", "env", "status", "example", "messages", "outcome", "n_completion_tokens"]


def candidates_of(rollouts: Rows) -> list[CandidateText]:
    """One for each row, in order."""
    return [CandidateText(**row) for row in rollouts.select(_READ).to_pylist()]


def score_rows(
    run: str, step: int, scorer: tuple[str, str], rollouts: Rows, verdicts: Sequence[Verdict]
) -> Rows:
    """Rows of `scores`.

    Args:
        run: the id of the run that scores.
        step: its step.
        scorer: name and version.
        rollouts: the rows scored.
        verdicts: one for each, in order.
    """
    n, (name, version) = rollouts.num_rows, scorer
    return batch_of(
        "scores",
        {
            "run": [run] * n,
            "step": [step] * n,
            "group": rollouts.column("group"),
            "sample": rollouts.column("sample"),
            "trajectory_id": rollouts.column("trajectory_id"),
            "scorer": [name] * n,
            "version": [version] * n,
            "status": [verdict.status for verdict in verdicts],
            "error_type": [verdict.error_type for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            "reward": [verdict.reward for verdict in verdicts],
            "components": [json.dumps(dict(verdict.components)) for verdict in verdicts],
            "subgroup": [verdict.subgroup for verdict in verdicts],
            "duration_s": [verdict.duration_s for verdict in verdicts],
        },
    )
