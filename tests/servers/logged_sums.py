"""A log of answers to sums, and which of them a run has imported."""

import json
import random
from pathlib import Path

from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read

N_ANSWERS = 3


def write_log(path: Path, prompts: range) -> Path:
    """Some answers to each prompt, right and wrong, as chats."""
    chance = random.Random(0)
    with path.open("w") as file:
        for a in prompts:
            for k in range(N_ANSWERS):
                said = str(a + 38 + (k == 2) * chance.randint(1, 9))
                messages = [{"role": "user", "content": f"{a}+38="}, {"role": "assistant", "content": said}]
                line = {"id": f"{a}-{k}", "messages": messages, "a": a, "b": 38, "answer": str(a + 38)}
                file.write(json.dumps(line) + "\n")
    return path


def said(folder: RunFolder) -> list[str]:
    """Id in the log of each stored trajectory."""
    outcomes = read(folder, "rollouts", ["outcome"])["outcome"].to_pylist()
    return sorted(json.loads(each)["id"] for each in outcomes)
