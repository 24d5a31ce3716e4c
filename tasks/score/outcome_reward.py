"""The reward that the environment itself said at the end of an episode."""

from typing import SupportsFloat

from tasks.errors import ScoreError
from tasks.score.scorer import Candidate, Reward


class EnvironmentScorer:
    """outcome["reward"], with outcome["metrics"], those that are numbers, as its components.

    Example: an episode that closed with {"reward": 0.5, "metrics": {"tool_calls": 2}} is rewarded with 0.5.
    """

    name = "environment"
    version = "1"

    async def score(self, candidate: Candidate) -> Reward:
        """Nothing is computed, so it stays on the event loop."""
        reward = candidate.outcome.get("reward")
        if not isinstance(reward, SupportsFloat):
            names = ", ".join(sorted(candidate.outcome)) or "none"
            raise ScoreError(
                f"expected a number as `reward` in the outcome of environment {candidate.env}, got {reward!r}; "
                f"the outcome's fields: {names}"
            )
        metrics = candidate.outcome.get("metrics")
        numbers = metrics if isinstance(metrics, dict) else {}
        components = {
            str(name): float(value) for name, value in numbers.items() if isinstance(value, int | float)
        }
        return Reward(float(reward), components)
