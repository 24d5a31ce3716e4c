"""Policy version: the name of one state of the weights, in trainer, servers and stored rows."""

from dataclasses import dataclass
from typing import Self

from rollmill.tasks.errors import RequestError


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """Name of the policy's weights after training on a number of batches: `run:incarnation:version`.

    Attributes:
        run: random id of the run, from run.json; it distinguishes weights of other runs on an attached server.
        incarnation: counts the trainers of the run that loaded a checkpoint or the start model.
        version: number of stored batches trained on; 0 is the start model.

    Example: str(PolicyVersion("9f2c", 1, 12)) is "9f2c:1:12".
    """

    run: str
    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.run}:{self.incarnation}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `run:incarnation:version`; raises RequestError for other text, such as "default" of a new server."""
        run, *numbers = text.split(":")
        if not cls.is_one(text):
            raise RequestError(f"a server reports the weights {text!r}, expected run:incarnation:version")
        return cls(run, int(numbers[0]), int(numbers[1]))

    @staticmethod
    def is_one(text: str) -> bool:
        """Return True for the name of a policy version of any run, False for other text, such as "default" of a new server."""
        _, *numbers = text.split(":")
        return len(numbers) == 2 and all(number.isdecimal() for number in numbers)
