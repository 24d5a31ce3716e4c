"""Runs one benchmark's script in a separate process, which ends with all that it started."""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmill.tasks.processes.launched_process import LaunchedProcess

ROOT = Path(__file__).parents[2]
LOGS = ROOT / ".rollmill" / "bench"
GRACE_S = 20.0
SHOWN_LINES = 20


class ScriptError(Exception):
    """A script failed, took too long, or its last line is no JSON object; with what it said."""


async def run_script(script: str, arguments: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    """Run `benchmarks.SCRIPT`, pass on what it printed, and return the JSON object of its last line.

    Raises:
        ScriptError: it has none.
    """
    log = LOGS / f"{script}.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    process = LaunchedProcess.start(script, command, log=log, cwd=ROOT, stop_grace_s=GRACE_S)
    try:
        async with asyncio.timeout(timeout_s):
            status = await process.wait()
    except TimeoutError:
        raise ScriptError(
            f"not done after {timeout_s:g} s; {log}:\n{process.log_tail(SHOWN_LINES)}"
        ) from None
    finally:
        await process.stop()
    if status:
        raise ScriptError(f"status {status}; {log}:\n{process.log_tail(SHOWN_LINES)}")
    *lines, last = log.read_text(errors="replace").splitlines() or [""]
    print("\n".join(lines), flush=True)
    with suppress(json.JSONDecodeError):
        found = json.loads(last)
        if isinstance(found, dict):
            return found
    raise ScriptError(f"its last line is no JSON object: {last[:200]!r}; {log}")
