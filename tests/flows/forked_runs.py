"""`rollmill run` or `rollmill collect` again and again, each in a forked child: what it imports is imported once.

A line in, COMMAND NAME KEY=VALUE ..., begins the run of that name, with other settings for those that are given. A line out is the child's process id, the next one its exit status.
"""

import os
import sys
from pathlib import Path

import rollmill.flows.collect
import rollmill.flows.post_train  # noqa: F401 - as well
from rollmill.flows.commands.new_runs import collect_here, run_here
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import apply_overrides, validate


def main() -> None:
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    sys.stdout.write("ready\n")
    for line in iter(sys.stdin.readline, ""):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            run(config, *line.split())
            return
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run(config: RunConfig, command: str, name: str, *overrides: str) -> None:
    """What the command does; its output goes to this process's error stream."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    given = validate(apply_overrides(config.model_dump(mode="json"), overrides)) if overrides else config
    (collect_here if command == "collect" else run_here)(given, name, again=False)


if __name__ == "__main__":
    main()
