"""The first process of a sandbox: runs one command after another within limits, and reports how each ended.

Standard library only, run as text: `python -I -S -c TEXT UID MEMORY_BYTES MAX_PROCESSES MAX_FILES OUTPUT_BYTES`.

A request on standard input is `REQUEST`, the words of the command joined by NUL, and its standard input. An answer on standard output
is `ANSWER`, the standard output and the standard error of the command. At the end of its standard input the process ends, and
with it, as process 1 of its namespace, whatever else runs there. After each command all other processes are killed.

The commands are not trusted. The kernel keeps their signals from process 1 of their namespace, which handles none; they cannot read or
trace it, because it is not dumpable.
"""

import _socket
import ctypes
import errno
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

REQUEST = struct.Struct(">dII")
"""Time limit in seconds, number of bytes of the command, and of its standard input."""
ANSWER = struct.Struct(">iBdII")
"""Exit status, index in LIMITS, duration in seconds, number of bytes of standard output, and of standard error."""
LIMITS = ("", "time", "memory", "output", "files")
"""Why a command was stopped; the first: it ended by itself."""

# Milliseconds between two looks at memory and files, which the kernel does not report by itself.
LOOK_MS = 20
MAX_OPEN_FILES = 256
# Address space of a process beyond its memory. Without a limit the kernel's tables of pages that are only read have none.
ADDRESS_BYTES = 16 << 30
# Lower than the priority of this process, so that a hundred busy ones do not keep it from ending them.
NICENESS = 10
CANNOT_RUN = 127
SIGNALLED = 128
_PIPE_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_FILE_SYSTEMS = ("/tmp", "/dev/shm")


class RunningCommand:
    """A running command: its process, the ends of its pipes, and what it has printed.

    Attributes:
        reason: the limit for which it has to be stopped; empty for none.
        open: our ends of the pipes that are open.
        texts: what it has printed, by our end of the pipe: standard output, then standard error.
    """

    def __init__(self, words: list[bytes], stdin: bytes, timeout_s: float, output_bytes: int) -> None:
        self.began, self.timeout_s, self.output_bytes = time.monotonic(), timeout_s, output_bytes
        self.stdin = memoryview(stdin)
        self.reason = ""
        theirs_in, self.ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, (theirs_in, theirs_out, theirs_err))
        for descriptor in (theirs_in, theirs_out, theirs_err):
            os.close(descriptor)
        self.pidfd = os.pidfd_open(self.pid)
        self.texts = {ours_out: bytearray(), ours_err: bytearray()}
        self.open = {self.ours_in, *self.texts}
        for descriptor in self.open:
            os.set_blocking(descriptor, False)

    def wait(self, find_excess: Callable[[], str]) -> None:
        """Pass on input and output until the command ends, or exceeds a limit; `find_excess` is asked all LOOK_MS."""
        poll = select.poll()
        # The end of our standard input is reported without a request for it: whoever wants the answer is gone.
        poll.register(0, select.POLLRDHUP)
        for descriptor in (self.pidfd, *self.texts):
            poll.register(descriptor, select.POLLIN)
        poll.register(self.ours_in, select.POLLOUT)
        look_at = 0.0
        while not self.reason:
            left_s = self.began + self.timeout_s - time.monotonic()
            events = dict(poll.poll(max(0, min(LOOK_MS, left_s * 1000))))
            if 0 in events:
                end_processes(self.pid)
                sys.exit(0)
            for descriptor in events.keys() & self.open:
                self._pass_on(descriptor)
                if descriptor not in self.open:
                    poll.unregister(descriptor)
            if self.pidfd in events:
                return
            if (now := time.monotonic()) >= look_at:
                look_at = now + LOOK_MS / 1000
                self.reason = self.reason or find_excess()
            if left_s <= 0:
                self.reason = self.reason or "time"

    def finish(self) -> tuple[int, int, float, bytes, bytes]:
        """End all processes; returns the fields of ANSWER up to the duration, and what was printed."""
        status = end_processes(self.pid)
        for descriptor, text in self.texts.items():
            before = -1
            # What is left in the pipe. Where nothing is isolated, another process may hold its other end.
            while descriptor in self.open and len(text) > before and not self.reason:
                before = len(text)
                self._pass_on(descriptor)
        for descriptor in (self.pidfd, *self.open):
            os.close(descriptor)
        out, err = (bytes(text[: self.output_bytes]) for text in self.texts.values())
        return status, LIMITS.index(self.reason), time.monotonic() - self.began, out, err

    def _pass_on(self, descriptor: int) -> None:
        """Read or write once, and close our end where the other one is closed, or nothing is left to write."""
        is_over = False
        try:
            if descriptor == self.ours_in:
                self.stdin = self.stdin[os.write(descriptor, self.stdin[:_PIPE_BYTES]) :]
                is_over = not self.stdin
            else:
                text, found = self.texts[descriptor], os.read(descriptor, _PIPE_BYTES)
                text += found
                is_over = not found
                if len(text) > self.output_bytes:
                    self.reason = "output"
        except BlockingIOError:
            return
        except BrokenPipeError:
            is_over = True
        if is_over:
            self.open.discard(descriptor)
            os.close(descriptor)


def _become(words: list[bytes], streams: tuple[int, int, int]) -> None:
    """Become the command, in the forked process; never returns."""
    try:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.setsid()
        os.nice(NICENESS)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, b"cannot run %s: %s\n" % (words[0], os.strerror(error.errno or 0).encode()))
    finally:
        os._exit(CANNOT_RUN)


def find_excess(memory_bytes: int, max_files: int, buffer_bytes: int) -> str:
    """Return which of memory and files is used beyond its limit in this sandbox; empty if none is."""
    if os.getpid() != 1:
        return ""
    for place in _FILE_SYSTEMS:
        found = os.statvfs(place)
        if found.f_files - found.f_ffree > max_files:
            return "files"
    used = sum(map(read_memory, list_processes())) + count_sockets() * buffer_bytes
    return "memory" if used > memory_bytes else ""


def count_sockets() -> int:
    """Return the number of sockets of this sandbox, those included that are closed and hold what is not read yet."""
    with open("/proc/net/sockstat", "rb") as statistics:  # noqa: PTH123 - as below
        return int(statistics.readline().split()[2])


def read_buffer() -> int:
    """Return the bytes that a socket may hold; the filter of system calls refuses to change it.

    They are memory of no process, so every socket counts with all of them.
    """
    made = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    size = int(made.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF))
    made.close()
    return size


def list_processes() -> list[int]:
    """Return the ids of the other processes of this sandbox."""
    return [
        int(each)
        for each in os.listdir("/proc")  # noqa: PTH208 - importing pathlib takes 10 ms
        if each.isdecimal() and each != "1"
    ]


def read_memory(pid: int) -> int:
    """Return the bytes of memory of a process that are no file's, swapped ones and its tables of pages included; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:  # noqa: PTH123 - as above
            text = status.read()
    except OSError:
        return 0
    total = 0
    for name in (b"\nRssAnon:", b"\nRssShmem:", b"\nVmSwap:", b"\nVmPTE:"):
        place = text.find(name)
        if place >= 0:
            total += int(text[place + len(name) : text.index(b"kB", place)])
    return total << 10


def end_processes(pid: int) -> int:
    """Kill all processes but this one and wait for their end; returns the exit status of `pid`, 128 + n after signal n.

    Outside of a separate namespace: the process `pid` and its process group.
    """
    found = None
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1 if os.getpid() == 1 else -pid, signal.SIGKILL)
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if ended == pid:
            found = os.waitstatus_to_exitcode(status)
        elif ended == 0:
            time.sleep(0.001)
    if found is None:
        return CANNOT_RUN
    return found if found >= 0 else SIGNALLED - found


def limit(which: int, value: int) -> None:
    """Lower a limit of this process and all that it starts, so that none can raise it."""
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def give_up_rights(uid: int, memory_bytes: int, max_processes: int) -> None:
    """Become the user `uid`, unless that is 0, and limit what this process and all that it starts may use."""
    with open("/proc/self/oom_score_adj", "w") as adjustment:  # noqa: PTH123 - as above
        # If the machine's memory ends, this sandbox ends first.
        adjustment.write("1000")
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    is_first = os.getpid() == 1
    # Outside of a separate namespace it ends at the end of its input, once it has ended the command.
    if prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) or (
        is_first and prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    ):
        raise OSError(ctypes.get_errno(), "prctl")
    if is_first:
        # The kernel counts the processes of a user, of a namespace of users where there is one. This process is one more.
        limit(resource.RLIMIT_NPROC, max_processes + 1)
    limit(resource.RLIMIT_DATA, memory_bytes)
    limit(resource.RLIMIT_AS, memory_bytes + ADDRESS_BYTES)
    limit(resource.RLIMIT_FSIZE, memory_bytes)
    limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_MSGQUEUE, 0)


def read_exactly(n_bytes: int) -> bytes:
    """Read from standard input; ends this process at its end."""
    found = bytearray()
    while len(found) < n_bytes:
        new = os.read(0, min(_PIPE_BYTES, n_bytes - len(found)))
        if not new:
            sys.exit(0)
        found += new
    return bytes(found)


def write_all(content: bytes) -> None:
    """Write to standard output; ends this process if nobody reads."""
    left = memoryview(content)
    while left:
        try:
            left = left[os.write(1, left) :]
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                sys.exit(0)
            raise


def main() -> None:
    """Handle requests until the end of standard input."""
    # Python's handler would let commands end process 1.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    uid, memory_bytes, max_processes, max_files, output_bytes = map(int, sys.argv[1:])
    give_up_rights(uid, memory_bytes, max_processes)
    buffer_bytes = read_buffer()
    while True:
        timeout_s, n_words, n_stdin = REQUEST.unpack(read_exactly(REQUEST.size))
        words = read_exactly(n_words).split(b"\0")
        stdin = read_exactly(n_stdin)
        command = RunningCommand(words, stdin, timeout_s, output_bytes)
        command.wait(lambda: find_excess(memory_bytes, max_files, buffer_bytes))
        *answer, out, err = command.finish()
        write_all(ANSWER.pack(*answer, len(out), len(err)) + out + err)


if __name__ == "__main__":
    main()
