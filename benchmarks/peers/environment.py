"""A peer's environment, made here at first use, and a process in it."""

import os
import subprocess
import sys
from pathlib import Path

FILES = Path(__file__).parent
ENVIRONMENTS = Path(__file__).parents[2] / ".rollmill" / "peers"
TIMEOUT_S = 900.0
CPU_BUILD = "+cpu"
"""What torch's version ends with when it is the build for CPUs, which is not among Python's packages."""
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "WEAVE_DISABLED": "true",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""What keeps a peer from asking the network for prices and models, and from telling it what it does."""


class PeerError(Exception):
    """A peer's environment could not be made, or the peer failed."""


def environment_of(peer: str) -> Path:
    """The Python of a peer's environment, which has exactly what `PEER.txt` next to this file pins.

    Raises:
        PeerError: it cannot be installed.
    """
    pins, folder = (FILES / f"{peer}.txt").read_text(), ENVIRONMENTS / peer
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if installed.is_file() and installed.read_text() == pins:
        return python
    print(f"installing {peer} in {folder}", file=sys.stderr)
    uv = Path(sys.executable).with_name("uv")
    run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", FILES / f"{peer}.txt"]
    try:
        run(install)
    except PeerError:
        if CPU_BUILD not in pins:
            raise
        run([*install, "--torch-backend", "cpu"])  # PyTorch's own index has it, where the find-links do not
    installed.write_text(pins)
    return python


def peer_variables() -> dict[str, str]:
    """A peer's environment variables: ours, without our modules, and offline; uv looks where pip does."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | OFFLINE
    return {"UV_FIND_LINKS": own.get("PIP_FIND_LINKS", "").replace(" ", ",")} | own


def run(command: list[object], stdin: str = "") -> str:
    """Run a command to its end; returns its standard output.

    Raises:
        PeerError: it failed; with what it said.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=peer_variables(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise PeerError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout
