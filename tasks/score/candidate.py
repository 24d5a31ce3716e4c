"""A trajectory on its way to a scorer: its JSON columns as text, which is cheap to hand to another process."""

import json
from dataclasses import dataclass

from tasks.score.scorer import Candidate


@dataclass(frozen=True, slots=True)
class CandidateText:
    """A Candidate whose JSON is still text; the fields are those of a rollout row."""

    trajectory_id: str
    env: str
    status: str
    example: str
    messages: str
    outcome: str
    n_completion_tokens: int

    def parsed(self) -> Candidate:
        """The candidate."""
        return Candidate(
            trajectory_id=self.trajectory_id,
            example=json.loads(self.example),
            messages=json.loads(self.messages),
            is_complete=self.status == "complete",
            outcome=json.loads(self.outcome),
            env=self.env,
            n_completion_tokens=self.n_completion_tokens,
        )
