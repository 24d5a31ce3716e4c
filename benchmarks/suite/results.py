"""What was measured last: benchmarks/results.json, which the table and the model of the cost are made from."""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.suite.figures import Figure, Mode
from benchmarks.suite.process import ROOT

RESULTS = ROOT / "benchmarks" / "results.json"
PACKAGES = ("prefect", "torch", "deepspeed", "transformers", "pyarrow", "polars")


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one script.

    Attributes:
        values: the JSON object of its last line.
        date: when it began, in UTC to the minute.
        seconds: that it took; 0 where they were not kept.
        commit: of the checkout, `-dirty` with changes.
        machine: processors, cores and memory.
        versions: of packages.
        priority: of the command, and so of what it started: "ordinary", or "real-time 10"; empty where it was not kept.
    """

    script: str
    mode: Mode
    values: dict[str, Any]
    date: str
    seconds: float
    commit: str
    machine: str
    versions: dict[str, str] = field(default_factory=dict)
    priority: str = ""


class Results:
    """The newest result of each script and mode."""

    def __init__(self, path: Path = RESULTS) -> None:
        """Read them; none where the file is not."""
        self._path = path
        stored = json.loads(path.read_text()) if path.exists() else []
        self._kept = {(each["script"], each["mode"]): Result(**each) for each in stored}

    def __iter__(self) -> Iterator[Result]:
        return iter(self._kept.values())

    def keep(self, result: Result) -> None:
        """Put a result in the place of the one before it, in the file too."""
        self._kept[result.script, result.mode] = result
        ordered = [asdict(self._kept[key]) for key in sorted(self._kept)]
        self._path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")

    def newest(self, script: str, figure: Figure) -> Result | None:
        """The newest result that has a figure."""
        having = [each for each in self if each.script == script and figure.value(each.values) is not None]
        return max(having, key=lambda each: each.date, default=None)


def result_of(script: str, mode: Mode, values: dict[str, Any], started: datetime, commit: str) -> Result:
    """A result of here and now, for a script that has just ended."""
    return Result(
        script=script,
        mode=mode,
        values=values,
        date=started.strftime("%Y-%m-%d %H:%M"),
        seconds=round((datetime.now(UTC) - started).total_seconds(), 1),
        commit=commit,
        machine=machine(),
        versions={package: importlib.metadata.version(package) for package in PACKAGES},
        priority=priority(),
    )


def priority() -> str:
    """Of this process, which those that it starts have too."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return f"real-time {os.sched_getparam(0).sched_priority}"
    return "ordinary"


def commit_of() -> str:
    """Of the checkout, `-dirty` when it has changes; empty outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> str:
    """Example: "2 cores, AMD EPYC, 24 GiB, Linux 6.1"."""
    processors = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*: (.*)$", processors, re.MULTILINE)
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    kernel = ".".join(platform.release().split(".")[:2])
    processor = named[1].strip() if named else platform.machine()
    return f"{os.cpu_count()} cores, {processor}, {memory_gib:.0f} GiB, {platform.system()} {kernel}"
