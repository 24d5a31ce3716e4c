"""The name of one state of the weights, the same in trainer, servers and rows."""

from dataclasses import dataclass
from typing import Self

from tasks.errors import RequestError


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """`run:incarnation:version`, so that a server left over from another run is never taken for ours.

    Attributes:
        run: random id of the run, from run.json.
        incarnation: rises whenever a trainer loads state.
        version: stored batches applied; 0 is the starting model.

    Example: str(PolicyVersion("9f2c", 1, 12)) is "9f2c:1:12".
    """

    run: str
    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.run}:{self.incarnation}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `run:incarnation:version`; RequestError for anything else, a fresh server's "default" too."""
        run, *numbers = text.split(":")
        if not cls.is_one(text):
            raise RequestError(f"a server reports the weights {text!r}, expected run:incarnation:version")
        return cls(run, int(numbers[0]), int(numbers[1]))

    @staticmethod
    def is_one(text: str) -> bool:
        """True for the name of a policy's weights, of any run; False for a fresh server's "default"."""
        _, *numbers = text.split(":")
        return len(numbers) == 2 and all(number.isdecimal() for number in numbers)
