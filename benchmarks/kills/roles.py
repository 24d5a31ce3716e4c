"""The roles of processes that a run consists of, and how one of a role is found below the flow's process."""

import random

import psutil

ROLES = ("flow", "trainer rank", "server", "environment", "scorer", "Prefect server", "S3")
MODULES = {
    "trainer rank": "rollmill.tasks.train.service.trainer_process",
    "server": "vllm.entrypoints.openai.api_server",
    "environment": "rollmill.tasks.rollout.environment_worker",
    "scorer": "rollmill.tasks.score.score_worker",
}
"""The module that the processes of a role below the flow run."""
# Processes that start the role's own, whose command line names its module too.
STARTERS = ("supervisor.py", "rank_launcher")
TRACKER = "resource_tracker"


def find_processes(flow_pid: int, role: str) -> list[psutil.Process]:
    """Return the living processes of a role below a flow's process; a server's engine is one of the server's."""
    module = MODULES[role]
    try:
        below = psutil.Process(flow_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found: list[psutil.Process] = []
    for process in below:
        try:
            words = " ".join(process.cmdline())
            if module in words and not any(each in words for each in STARTERS):
                helpers = process.children(recursive=True)
                found += [process, *(each for each in helpers if TRACKER not in " ".join(each.cmdline()))]
        except psutil.NoSuchProcess:
            # It ended while we looked.
            continue
    return found


class Deck:
    """Roles in random order, each once before one comes again."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._left = chance, list[str]()

    def draw(self) -> str:
        """Return the next role."""
        if not self._left:
            self._left = self._chance.sample(ROLES, len(ROLES))
        return self._left.pop()
