"""The reward that the environment itself said at the end of an episode."""

from collections.abc import Mapping
from typing import SupportsFloat

from tasks.errors import ScoreError
from tasks.score.scorer import Candidate, Reward


class EnvironmentScorer:
    """outcome["reward"], with outcome["rewards"] and outcome["metrics"], those that are numbers, as its components.

    An outcome with an "error" and no reward is one that the environment could not score.

    Example: an episode that closed with {"reward": 0.5, "metrics": {"tool_calls": 2}} is rewarded with 0.5.
    """

    name = "environment"
    version = "1"

    async def score(self, candidate: Candidate) -> Reward:
        """Nothing is computed, so it stays on the event loop."""
        reward = candidate.outcome.get("reward")
        if reward is None and (error := candidate.outcome.get("error")):
            raise ScoreError(f"environment {candidate.env} could not score it: {error}")
        if not isinstance(reward, SupportsFloat):
            names = ", ".join(sorted(candidate.outcome)) or "none"
            raise ScoreError(
                f"expected a number as `reward` in the outcome of environment {candidate.env}, got {reward!r}; "
                f"the outcome's fields: {names}"
            )
        components = {
            str(name): float(value)
            for part in ("rewards", "metrics")
            for name, value in _mapping(candidate.outcome.get(part)).items()
            if isinstance(value, int | float)
        }
        return Reward(float(reward), components)


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, Mapping) else {}
