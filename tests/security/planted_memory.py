"""User code that allocates as many GiB as an answer or its settings say; found by import path, in worker processes too."""

import subprocess
import sys
from typing import Self

from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.score.scorer import Candidate


def allocate(candidate: Candidate) -> float:
    return float(len(bytearray(int(candidate.answer) << 30)) >> 30)


def allocate_in_child(candidate: Candidate) -> float:
    code = f"bytearray({int(candidate.answer)} << 30)"
    return float(subprocess.run([sys.executable, "-c", code], check=False).returncode)


class Greedy:
    """An environment that allocates 5 GiB when it is created."""

    @classmethod
    def from_config(cls, _: RolloutConfig) -> Self:
        bytearray(5 << 30)
        return cls()
