"""A peer on the same work: its environment, made here at first use, and a process in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.schedules.latencies import ROLLOUT_SLOTS, SCORING_SLOTS, Latencies
from benchmarks.schedules.timeline import Interval, Timeline

FUSED, TWO_GATHERS = "openpipe-art-0.5.18", "openpipe-art-0.4.11"
"""ART that scores a group once it is complete, and ART that scores when all groups are."""

PEERS = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parents[2] / ".rollmill" / "peers"
TIMEOUT_S = 900.0
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "WEAVE_DISABLED": "true", "DO_NOT_TRACK": "1"}
"""What keeps a peer from asking the network for prices, and from telling it what it does."""


class PeerError(Exception):
    """A peer's environment could not be made, or the peer failed."""


def environment_of(peer: str) -> Path:
    """The Python of a peer's environment, which has exactly what `peers/PEER.txt` pins.

    Raises:
        PeerError: it cannot be installed.
    """
    pins, folder = (PEERS / f"{peer}.txt").read_text(), ENVIRONMENTS / peer
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if installed.is_file() and installed.read_text() == pins:
        return python
    print(f"installing {peer} in {folder}", file=sys.stderr)
    uv = Path(sys.executable).with_name("uv")
    _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    _run([uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", PEERS / f"{peer}.txt"])
    installed.write_text(pins)
    return python


def measure(peer: str, latencies: Latencies) -> Timeline:
    """What a peer's own pipeline makes of the work.

    Raises:
        PeerError: it failed; with what it said.
    """
    work = {
        "rollouts_s": latencies.rollouts_s,
        "group_scores_s": latencies.group_scores_s,
        "rollout_slots": ROLLOUT_SLOTS,
        "scoring_slots": SCORING_SLOTS,
    }
    said = _run([environment_of(peer), "-P", PEERS / "art_pipeline.py"], json.dumps(work))
    found = json.loads(said.splitlines()[-1])
    return Timeline(
        found["makespan_s"],
        [Interval(*each) for each in found["rollouts"]],
        [Interval(*each) for each in found["scores"]],
    )


def _run(command: list[object], stdin: str = "") -> str:
    """Run a command to its end; returns its standard output."""
    words = [str(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OFFLINE
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
