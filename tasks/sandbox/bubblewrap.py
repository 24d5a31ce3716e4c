"""Sandboxes of bubblewrap, and how commands run where there is none."""

import asyncio
import functools
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from rollmill.tasks.errors import ConfigError, SandboxError
from rollmill.tasks.sandbox import first_process
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.finished import Finished, Limit
from rollmill.tasks.sandbox.system_calls import make_filter

PROGRAM = "bwrap"
HOME = "/tmp"
MAX_PROCESSES = 64
"""Processes and threads that may run in a sandbox at once."""
MAX_FILES = 20_000
OUTPUT_BYTES = 1 << 20
"""Bytes that a command may print to standard output, and as many to standard error; one that prints more is stopped."""
SHARED_BYTES = 16 << 20
"""Size of /dev/shm."""
ANSWER_MARGIN_S = 10.0
"""Seconds after a command's time limit in which its sandbox must have answered, and in which it must end."""
CHECK_TIMEOUT_S = 30.0

# Of a root's folders, such as /usr, these: others, such as /usr/src, may have a project with its run folders.
_PARTS = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share")
_TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
# Each sandbox that root starts has a separate user, far from those of people and containers, so that limits are for it alone.
_FIRST_USER, _USERS = 2_100_000_000, 40_000_000
_ERROR_BYTES = 2000
"""Largest part of an error of bubblewrap that is shown."""


class Bubblewrap:
    """A sandbox: namespaces without network, a view of the machine's programs that cannot be written to, and an empty /tmp.

    It starts at the first command. If that of `config` is unsafe, commands run as the user, in a new folder.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""
        self._is_over = False
        self._one_at_a_time = asyncio.Lock()

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None
    ) -> Finished:
        """Run a command in /tmp and return how it ended; all processes that it started are ended too.

        A command that runs is waited for.

        Raises:
            SandboxError: the sandbox cannot be started, or has ended.
        """
        async with self._one_at_a_time:
            return await self._run(command, stdin, timeout_s)

    async def _run(self, command: Sequence[str], stdin: bytes, timeout_s: float | None) -> Finished:
        if self._is_over:
            raise SandboxError("the sandbox has ended")
        timeout_s = self._config.timeout_s if timeout_s is None else min(timeout_s, self._config.timeout_s)
        words = b"\0".join(os.fsencode(each.replace("\0", "")) for each in command)
        # Until the answer is here: an error or a cancellation leaves the sandbox in a state that is not known.
        self._is_over = True
        process = self._process = self._process or await self._start()
        try:
            async with asyncio.timeout(timeout_s + ANSWER_MARGIN_S):
                finished = await _ask(process, words, stdin, timeout_s)
        except TimeoutError:
            raise SandboxError(
                f"the sandbox did not answer within {timeout_s + ANSWER_MARGIN_S:g} s"
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            raise SandboxError(f"the sandbox ended: {await self._read_error(process)}") from None
        # What was written beyond the limit stays, so that the next command would be stopped too.
        self._is_over = finished.stopped_by == "files"
        return finished

    async def close(self) -> None:
        """End the sandbox with all its processes and files."""
        self._is_over = True
        process, self._process = self._process, None
        try:
            if process is not None:
                await _end(process)
        finally:
            if self._folder:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            if self._config.unsafe:
                self._folder = tempfile.mkdtemp(prefix="rollmill-unsafe-")
                command = _first_process(self._config, sys.base_prefix, 0)
                environment = _variables(self._config, sys.base_prefix, self._folder)
            else:
                command, environment = sandbox_command(self._config), {}
            with pass_filter(command) as (words, descriptors):
                return await asyncio.create_subprocess_exec(
                    *words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    cwd=self._folder or "/",
                    pass_fds=descriptors,
                    start_new_session=True,
                )
        except OSError as error:
            raise SandboxError(f"the sandbox cannot be started: {error}") from error

    async def _read_error(self, process: asyncio.subprocess.Process) -> str:
        if process.stderr is None:
            return ""
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_MARGIN_S):
                return (await process.stderr.read(_ERROR_BYTES)).decode(errors="replace").strip()
        return "it reports no reason"


async def _ask(process: asyncio.subprocess.Process, words: bytes, stdin: bytes, timeout_s: float) -> Finished:
    """Send a command to the first process of a sandbox and return its answer."""
    if process.stdin is None or process.stdout is None:
        raise SandboxError("the sandbox has no pipes")
    process.stdin.write(first_process.REQUEST.pack(timeout_s, len(words), len(stdin)) + words + stdin)
    await process.stdin.drain()
    header = await process.stdout.readexactly(first_process.ANSWER.size)
    status, limit, duration_s, n_out, n_err = first_process.ANSWER.unpack(header)
    if max(n_out, n_err) > OUTPUT_BYTES or limit >= len(first_process.LIMITS):
        raise SandboxError("the sandbox gave a malformed answer")
    out, err = await process.stdout.readexactly(n_out), await process.stdout.readexactly(n_err)
    return Finished(status, out, err, cast("Limit", first_process.LIMITS[limit]), duration_s)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a sandbox: its first process ends at the end of its input, and with it all others."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(ANSWER_MARGIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@contextmanager
def pass_filter(command: list[str]) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Return a command line of bubblewrap that takes the filter of system calls, and the file descriptor that it must inherit.

    The descriptor ends with the `with` block. A command without bubblewrap is returned unchanged, without a descriptor.
    """
    if Path(command[0]).name != PROGRAM:
        yield command, ()
        return
    program = make_filter(platform.machine())
    reader, writer = os.pipe()
    try:
        with open(writer, "wb") as output:  # noqa: PTH123 - a descriptor
            output.write(program)
        yield [command[0], "--seccomp", str(reader), *command[1:]], (reader,)
    finally:
        os.close(reader)


def sandbox_command(
    config: SandboxConfig, prefix: str = sys.base_prefix, *, is_root: bool = os.geteuid() == 0
) -> list[str]:
    """Return the command line of bubblewrap that starts a sandbox; `prefix` is the folder of Python, `is_root` who runs it."""
    # Found here, because it starts without variables.
    words = [shutil.which(PROGRAM) or PROGRAM]
    words += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--hostname",
        "sandbox",
        "--cap-drop",
        "ALL",
    ]
    uid = 0
    if is_root:
        # Root needs no namespace of users. The limit of processes does not bind it, so the first process becomes another user.
        uid = _FIRST_USER + secrets.randbelow(_USERS)
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    # Zeros as from /dev/zero, of which a shared mapping would be memory that no limit counts.
    words += ["--dev-bind", "/dev/full", "/dev/zero"]
    # Before what may be below them.
    for size, place in ((config.memory_bytes, HOME), (SHARED_BYTES, "/dev/shm")):
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", place]
    visible = visible_paths(config, prefix)
    # Folders that bubblewrap makes on the way are for their owner alone.
    above = {parent for path in visible for parent in Path(path).parents} - {Path("/"), Path(HOME)}
    for folder in sorted(map(str, above)):
        words += ["--perms", "0755", "--dir", folder]
    for path in visible:
        words += ["--ro-bind", path, path]
    for top in map(Path, _TOP):
        if top.is_symlink():
            words += ["--symlink", str(top.readlink()), str(top)]
        elif top.is_dir():
            words += ["--ro-bind", str(top), str(top)]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", HOME, "--clearenv"]
    for name, value in _variables(config, prefix, HOME).items():
        words += ["--setenv", name, value]
    return [*words, "--", *_first_process(config, prefix, uid)]


def visible_paths(config: SandboxConfig, prefix: str) -> list[str]:
    """Return the files and folders of this machine that can be read in a sandbox: programs, libraries and `config.paths`."""
    roots = dict.fromkeys(("/usr", "/usr/local", prefix))
    places = [Path(root, part) for root in roots for part in _PARTS]
    found = [str(place) for place in places if place.is_dir() and not place.is_symlink()]
    return [*found, *(each for each in _ETC if Path(each).exists()), *config.paths]


def _variables(config: SandboxConfig, prefix: str, home: str) -> dict[str, str]:
    """Return the environment variables of commands; none is the user's."""
    folders = [*config.paths, prefix, "/usr/local", "/usr", "/"]
    path = ":".join(dict.fromkeys(str(Path(each, "bin")) for each in folders))
    return {"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}


def _first_process(config: SandboxConfig, prefix: str, uid: int) -> list[str]:
    # Not the environment's interpreter, whose folder is not visible.
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    bounds = (uid, config.memory_bytes, MAX_PROCESSES, MAX_FILES, OUTPUT_BYTES)
    text = Path(first_process.__file__).read_text()
    return [str(Path(prefix, "bin", name)), "-I", "-S", "-c", text, *map(str, bounds)]


def check_bubblewrap(field: str, config: SandboxConfig) -> None:
    """Refuse settings with which no sandbox can be started on this machine; one is started, for a moment.

    Args:
        field: the section of the settings, such as score.sandbox.
        config: the section.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    for path in config.paths:
        if not Path(path).is_absolute() or not Path(path).is_dir():
            raise ConfigError(f"{field}.paths", path, "give the absolute path of a folder of this machine")
    if not config.unsafe and (remedy := find_obstacle(config)):
        unsafe = (
            f"or set {field}.unsafe=true, and the model's code runs as you, with your files and the network"
        )
        raise ConfigError(f"{field}.unsafe", False, f"{remedy}; {unsafe}")


@functools.lru_cache
def find_obstacle(config: SandboxConfig) -> str:
    """Return why no sandbox can be started, and the remedy; empty if one can."""
    if not shutil.which(PROGRAM):
        return f"model-written code runs in bubblewrap, and {PROGRAM} is not here: install it (Debian, Ubuntu: apt install bubblewrap)"
    try:
        with pass_filter(sandbox_command(config)) as (words, descriptors):
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={},
                cwd="/",
                pass_fds=descriptors,
                timeout=CHECK_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"a sandbox did not start within {CHECK_TIMEOUT_S:g} s"
    except (OSError, SandboxError) as error:
        return f"a sandbox cannot be started: {error}"
    if done.returncode == 0:
        return ""
    text = done.stderr[-_ERROR_BYTES:].decode(errors="replace").strip()
    return f"a sandbox cannot be started ({text}): {find_remedy(text)}"


def find_remedy(text: str, kernel: Path = Path("/proc/sys")) -> str:
    """Return what to do about an error of bubblewrap. `kernel`: the folder of the kernel's settings."""
    if "nknown option" in text:
        return "install bubblewrap 0.8 or newer"
    for name, forbidden, allowed in (
        ("user.max_user_namespaces", "0", "15000"),
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
    ):
        with suppress(OSError):
            if (kernel / name.replace(".", "/", 1)).read_text().strip() == forbidden:
                return f"allow users to make namespaces (as root: sysctl {name}={allowed})"
    return (
        "allow this process to make namespaces (a container has to be started for it, Docker's with --security-opt seccomp=unconfined "
        "--security-opt systempaths=unconfined, and with --cap-add SYS_ADMIN if it runs as root)"
    )
