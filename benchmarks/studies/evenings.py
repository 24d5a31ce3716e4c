"""What cycles of `rollmill improve` learn from a server's logs: figures of docs/lab/learning.md.

The tutorial docs/tutorials/improve.md on several evenings: 600 users ask the policy in production, each four times, and a cycle trains
on what the server logged. The start model is gated and promoted first, so that the first cycle is compared with it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.studies.commands import ROOT, Commands, commands_of
from rollmill.tasks.processes.launched_process import LaunchedProcess, free_port

PAGE = ROOT / "docs" / "tutorials" / "improve.md"
LONGEST_START_S = 600.0
IMPROVE = (
    *("improve", "quickstart", "chats", "--name", "nightly", "--set", "rollout.group_size=4", "--yes"),
    *("--set", "score.scorer=sums:right", "--min-reward", "0.3"),
)


@contextmanager
def served(commands: Commands, model: Path) -> Iterator[str]:
    """Start a vLLM server of a policy, which logs to chats/ in the study's folder; yields its address."""
    port = free_port()
    arguments = ("--model", str(model), "--port", str(port), "--dtype", "float32", "--max-model-len", "64")
    middleware = "rollmill.tasks.sync.vllm_plugin.request_log.RequestLog"
    process = LaunchedProcess.start(
        "vLLM server",
        [
            *(".venv-vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
            *(*arguments, "--chat-template", "plain.jinja", "--middleware", middleware),
        ],
        log=commands.folder / "vllm.log",
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "ROLLMILL_REQUEST_LOG": "chats"},
        cwd=commands.folder,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + LONGEST_START_S
        while not is_healthy(url):
            if not process.is_running or time.monotonic() > deadline:
                raise SystemExit(f"the vLLM server did not start: see {commands.folder / 'vllm.log'}")
            time.sleep(1)
        yield url
    finally:
        process.stop_now()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def write_files(commands: Commands) -> None:
    """Write the tutorial's scorer, users and chat template."""
    page = PAGE.read_text()
    for name in ("sums.py", "users.py"):
        (source,) = re.findall(rf"^```python\n(# {name}.*?)^```", page, re.DOTALL | re.MULTILINE)
        (commands.folder / name).write_text(source)
    (template,) = re.findall(r"save `plain\.jinja`: `([^`]+)`", page)
    (commands.folder / "plain.jinja").write_text(template)


def improve(commands: Commands, evenings: int, steps: int) -> list[str]:
    """Promote the start model, then let users ask and run a cycle on each evening; returns what each cycle printed."""
    commands.run("start", "run", "quickstart", "--set", "steps=1")
    commands.run("export", "export-policy", "quickstart", "models/first", "--version", "0")
    commands.run("gate", "gate", "models/first", "--min-reward", "0.3")
    commands.run("promote", "promote", "models/first", "--yes")
    printed = []
    for evening in range(evenings):
        asked = commands.folder / f"asked-{evening}"
        if not asked.exists():
            with served(commands, (commands.folder / "policies" / "production").resolve()) as url:
                users = (commands.folder / "users.py").read_text().replace("http://127.0.0.1:8000", url)
                subprocess.run([sys.executable, "-c", users, str(evening)], cwd=commands.folder, check=True)
            asked.touch()
        printed.append(commands.run(f"evening-{evening}", *IMPROVE, "--set", f"steps={steps}"))
    return printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evenings", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    with commands_of(parser) as (commands, words):
        write_files(commands)
        for printed in improve(commands, words.evenings, words.steps):
            print(printed)
        print(json.dumps({"benchmark": "evenings", "cpu_s": commands.cpu_s}))


if __name__ == "__main__":
    main()
