"""How long the garbage collector holds a process up."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Collections of a process, in all its threads: every one of them stops all others."""

    total_s: float = 0.0
    longest_s: float = 0.0


class GarbagePauses:
    """Counts what the collector takes.

    Attributes:
        so_far: since it was last taken.
    """

    def __init__(self) -> None:
        self.so_far = Pauses()
        self._started_s = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside."""
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)

    def take(self) -> Pauses:
        """What was counted since this was called last."""
        taken, self.so_far = self.so_far, Pauses()
        return taken

    def _collected(self, phase: str, _: Mapping[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._started_s = now_s
        elif self._started_s:
            pause_s = now_s - self._started_s
            self.so_far = Pauses(self.so_far.total_s + pause_s, max(self.so_far.longest_s, pause_s))
