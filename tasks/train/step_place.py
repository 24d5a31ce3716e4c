"""Which step rows are of, and where they lie."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where rows of a step are read and handed over.

    Attributes:
        folder: of the run.
        run: random id of the run.
        incarnation: the run's counter at the trainer's last load.
        hands_over: False when nothing is to be written, as when a step is only compared.
    """

    folder: str
    run: str
    step: int
    incarnation: int
    hands_over: bool = True
