"""The machine that a process runs on."""

from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def machine_id() -> str:
    """Return an id of this boot and process namespace: equal for processes that can open each other's memory.

    Raises:
        OSError: there is no /proc.
    """
    # Containers of one machine share its boot, but see neither each other's processes nor their memory.
    return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}"
