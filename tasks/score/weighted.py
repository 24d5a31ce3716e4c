"""A weighted sum of scorers, as one verdict."""

from collections.abc import Sequence
from dataclasses import replace

from tasks.errors import VerdictError
from tasks.score.registry import Part
from tasks.score.verdict import Verdict, failed


def weighted(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Verdict:
    """The sum of what the parts said of one trajectory; its components are the weighted rewards.

    A part that failed fails the sum, one that dropped the trajectory drops it; at most one may split the group.

    Example: weights 1 and 0.5 and rewards .8 and 1 give 1.3 with components .8 and .5.
    """
    duration_s = max(verdict.duration_s for verdict in verdicts)
    for status in ("failed", "dropped"):
        for part, verdict in zip(parts, verdicts, strict=True):
            if verdict.status == status:
                return replace(verdict, error=f"{part.label}: {verdict.error}", duration_s=duration_s)
    subgroups = {verdict.subgroup for verdict in verdicts} - {0}
    if len(subgroups) > 1:
        error = VerdictError("two scorers of the sum split the group; at most one may")
        return failed(error, duration_s)
    components = {
        part.label: part.weight * verdict.reward for part, verdict in zip(parts, verdicts, strict=True)
    }
    return Verdict(
        "scored",
        reward=sum(components.values()),
        components=components,
        subgroup=max(subgroups, default=0),
        duration_s=duration_s,
    )
