"""The machine that a process runs on."""

import resource
import socket
from pathlib import Path

STORE_FD_ENV = "ROLLMILL_STORE_FD"
"""Environment variable with the number of the open listening socket of rank 0's store; unset for other ranks."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


# More than requests and sandboxes need; some programs look at every number up to the limit.
_MOST_FILES = 1 << 16


def allow_open_files() -> None:
    """Let this process open as many files as the machine allows it: each request and each pipe is one, and shells often set 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if resource.RLIM_INFINITY != soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def machine_id() -> str:
    """Return an id of this boot and process namespace: equal for processes that can open each other's memory.

    Raises:
        OSError: there is no /proc.
    """
    # Containers of one machine share its boot, but see neither each other's processes nor their memory.
    return f"{_BOOT.read_text().strip()}/{_PROCESSES.stat().st_ino}"


def process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty if it has ended or is unknown."""
    try:
        # The name, in parentheses, may have blanks and parentheses: the fields after it begin at the last one.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Listen at one address of this machine, at a free port if `port` is 0.

    `host` is a name or an address of this machine. A name may have addresses of other machines too, as that of a headless
    service with several pods has.

    Raises:
        OSError: `host` has no address of this machine, or the port is taken.
    """
    failure = OSError()
    for family, _, _, _, (address, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            failure = error
    raise failure
