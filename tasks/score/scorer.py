"""The types of a scorer's input and output: everything that a module with a scorer needs to import."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Candidate:
    """The part of a trajectory that a scorer may read.

    Attributes:
        example: the problem, including the reference answer; JSON values.
        messages: the conversation, each {"role": ..., "content": ...}.
        is_complete: True if the policy ended its answer itself, False if it was cut off.
        outcome: what the environment reported at the end of the episode; JSON values, {} for nothing.
        env: name of the environment.
        n_completion_tokens: number of tokens that the policy sampled.
        turn_messages: [turns] index of each of the policy's own messages in `messages`, in the order in which they were sampled; like
            `turn_tokens` empty for a trajectory that an older Rollmill stored.
        turn_tokens: [turns] number of tokens that the policy sampled for each.
    """

    trajectory_id: str
    example: Mapping[str, object]
    messages: Sequence[Mapping[str, str]]
    is_complete: bool
    outcome: Mapping[str, object] = field(default_factory=dict)
    env: str = ""
    n_completion_tokens: int = 0
    turn_messages: Sequence[int] = ()
    turn_tokens: Sequence[int] = ()

    @property
    def answers(self) -> list[str]:
        """[turns] what the policy said, turn by turn; messages of role assistant that it did not sample are left out."""
        return [self.messages[place]["content"] for place in self.turn_messages]

    @property
    def answer(self) -> str:
        """The policy's last message; empty if there is none."""
        said = (each["content"] for each in reversed(self.messages) if each["role"] == "assistant")
        return next(said, "")


@dataclass(frozen=True, slots=True)
class Reward:
    """A trajectory's reward, and optionally those of its turns or of its sampled tokens.

    Example: Reward(turns=[0.0, 1.0]) of a trajectory with two turns has the value 1.

    Attributes:
        value: of the whole trajectory; None: the sum of `turns` or `tokens`. Given with them, it is what evaluations and the statistics of
            groups use; credit by turn or token uses them alone.
        components: the terms it consists of, by name.
        subgroup: the subgroup it is compared with; 0 unless the scorer splits the group.
        turns: [turns] reward of each of the policy's turns, as in `Candidate.turn_messages`; None: not given.
        tokens: [n_completion_tokens] reward of each sampled token, in the order in which they were sampled; None: not given.
    """

    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    subgroup: int = 0
    turns: Sequence[float] | None = None
    tokens: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """Verdict that excludes a trajectory from training, with a reason; it does not count as a failure."""

    reason: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Verdict that excludes all trajectories that a group scorer received from training, with a reason."""

    reason: str


Given: TypeAlias = float | Reward | Dropped
"""What a scorer gives for one trajectory."""


class Scorer(Protocol):
    """Gives a reward to a single trajectory.

    If `score` is `async def`, it runs on the event loop: it may wait but must not compute. Otherwise it runs in a worker process.
    An exception becomes a failed row for that trajectory.

    A class may set `by_group = True`; its `score` then takes the surviving candidates of a group and returns one verdict for each,
    or DropGroup. It may have a `close` method, also `async`, which is called at the end. `keeps_state = False` declares that a reward
    depends on the candidate alone, and `keeps_state = True` that it does not; `rollmill ab` tries a scorer that declares nothing.
    """

    name: str
    version: str

    def score(self, candidate: Candidate) -> Given | Awaitable[Given]:
        """Return the trajectory's reward, or why it is dropped."""


Function = TypeVar("Function", bound=Callable[..., object])


def by_group(function: Function) -> Function:
    """Mark a function as a group scorer: it takes the candidates of a group and returns one verdict for each."""
    function.by_group = True  # type: ignore[attr-defined] # functions take attributes
    return function


@dataclass(frozen=True, slots=True)
class CandidateText:
    """A Candidate whose JSON is not parsed yet; its fields are columns of the data set `rollouts`."""

    trajectory_id: str
    env: str
    status: str
    example: str
    messages: str
    outcome: str
    n_completion_tokens: int
    turn_messages: Sequence[int] = ()
    turn_tokens: Sequence[int] = ()

    def parse(self) -> Candidate:
        """Return the Candidate, with its JSON parsed."""
        return Candidate(
            trajectory_id=self.trajectory_id,
            example=json.loads(self.example),
            messages=json.loads(self.messages),
            is_complete=self.status == "complete",
            outcome=json.loads(self.outcome),
            env=self.env,
            n_completion_tokens=self.n_completion_tokens,
            turn_messages=self.turn_messages,
            turn_tokens=self.turn_tokens,
        )
