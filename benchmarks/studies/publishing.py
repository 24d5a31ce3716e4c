"""What `rollmill publish` costs in each format: figures of docs/lab/costs.md.

A run of the quickstart is published whole, again with nothing new, and again after one more step. Reported are the CPU seconds of the
whole commands.
"""

import argparse
import json

from benchmarks.studies.commands import Commands, commands_of

FORMATS = ("delta", "iceberg", "lance")


def publish(commands: Commands, steps: int) -> None:
    """Publish a run after `steps` steps, twice, and after one more, in each format."""
    length = ("run", "quickstart", "--name", "sampled", "--set", "evaluate.every=3")
    commands.run("run", *length, "--set", f"steps={steps}")
    for each in FORMATS:
        for when in ("all", "again"):
            commands.run(f"{each}-{when}", "publish", "sampled", "--to", f"{each}:./lake-{each}")
    commands.run("run-on", *length, "--set", f"steps={steps + 1}")
    for each in FORMATS:
        commands.run(f"{each}-last", "publish", "sampled", "--to", f"{each}:./lake-{each}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=23)
    with commands_of(parser) as (commands, words):
        publish(commands, words.steps)
        print(json.dumps({"benchmark": "publishing", "cpu_s": commands.cpu_s}))


if __name__ == "__main__":
    main()
