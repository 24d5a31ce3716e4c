"""The processes that a test started, and those that they started, by a variable of their environment."""

from pathlib import Path


def find_marked_processes(marker: str) -> dict[int, str]:
    """Command line of every living process that has the marker in its environment, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended meanwhile, or is not ours
    return found
