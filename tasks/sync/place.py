"""Where this process runs, as far as a choice of the transport goes by it."""

from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def this_machine() -> str:
    """Equal for two processes that can open each other's memory: the boot's id and the namespace of processes."""
    return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}"
