"""Planted programs that attack: each is stopped or fails, nothing outside of the sandbox is changed, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollmill.tasks.processes.supervisor import descendants
from rollmill.tasks.sandbox.bubblewrap import MAX_FILES, OUTPUT_BYTES, pass_filter, sandbox_command
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.finished import Finished
from rollmill.tasks.sandbox.first_process import ANSWER, REQUEST
from rollmill.tasks.sandbox.sandbox import open_sandbox

pytestmark = pytest.mark.sandbox

MIB = 1 << 20
CONFIG = SandboxConfig(timeout_s=8.0, memory_bytes=128 * MIB)


async def run(*command: str, config: SandboxConfig = CONFIG) -> Finished:
    async with open_sandbox("sandbox", config) as sandbox:
        return await sandbox.run(command)


async def python(program: str, config: SandboxConfig = CONFIG) -> Finished:
    if "fork" in program and "sleep" not in program:
        # Those that sleep take memory. A page that forked processes share counts for each of them.
        config = config.model_copy(update={"memory_bytes": 1024 * MIB})
    return await run("python3", "-I", "-S", "-c", program, config=config)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    assert set(descendants(os.getpid())) <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "time"),
        ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "time"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 65536)", "output"),
        ("for i in range(10**6): open(f'/tmp/{i}', 'w').close()", "files"),
        ("for i in range(10**6): open(f'/dev/shm/{i}', 'w').close()", "files"),
        # Each of eight processes is within the limit of one, and all together are not.
        (
            "import os, time\nfor i in range(3): os.fork()\nx = bytearray(30 << 20)\n"
            "x[::4096] = bytes(len(x) >> 12)\ntime.sleep(60)",
            "memory",
        ),
        # The kernel's tables of pages that are only read, and of which each is the same page of zeros.
        (
            "import mmap, os, time\nfor i in range(3): os.fork()\nn = 15 << 30\n"
            "x = mmap.mmap(-1, n, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)\n"
            "x.madvise(mmap.MADV_NOHUGEPAGE)\nfor i in range(0, n, 2 << 20): x[i]\ntime.sleep(60)",
            "memory",
        ),
        # What is in sockets is memory of no process.
        (
            "import os, socket, time\nfor i in range(3): os.fork()\nx = []\nfor i in range(100):\n x += socket.socketpair()\n"
            " x[-1].setblocking(False)\n try:\n  while True: x[-1].send(bytes(65536))\n except BlockingIOError: pass\n"
            "time.sleep(60)",
            "memory",
        ),
        # Nor are those that nobody has accepted, and that are closed.
        (
            "import socket, time\na = socket.socket(socket.AF_UNIX)\na.bind('x')\na.listen(4096)\nfor i in range(2000):\n"
            " b = socket.socket(socket.AF_UNIX)\n b.connect('x')\n b.setblocking(False)\n"
            " try:\n  while True: b.send(bytes(65536))\n except BlockingIOError: b.close()\ntime.sleep(60)",
            "memory",
        ),
    ],
    ids=[
        *("loop", "fork bomb", "stdout", "stderr", "files", "shared files", "processes", "tables of pages"),
        *("sockets", "closed sockets"),
    ],
)
async def test_a_program_that_takes_too_much_is_stopped(program: str, limit: str) -> None:
    config = CONFIG.model_copy(update={"timeout_s": 2.0 if limit == "time" else 30.0})
    finished = await python(program, config)
    assert (finished.status, finished.stopped_by) == (128 + signal.SIGKILL, limit)
    assert max(len(finished.stdout), len(finished.stderr)) <= OUTPUT_BYTES


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os\npids = [os.fork() for _ in range(100)]", "BlockingIOError"),
        ("f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))", "File too large"),
        (
            "for i in range(4):\n f = open(f'/tmp/{i}', 'wb', 0)\n for _ in range(64): f.write(bytes(1 << 20))\n",
            "No space left",
        ),
        ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
        ("open('/usr/bin/x', 'w')", "Read-only file system"),
        ("open('/x', 'w')", "Read-only file system"),
        ("open('/dev/x', 'w')", "Read-only file system"),
        ("import os; os.kill(1, 0); open('/proc/1/environ').read()", "PermissionError"),
        ("import os; os.listdir('/proc/1/fd')", "PermissionError"),
        ("import os; os.memfd_create('x')", "Function not implemented"),
        # Pages of shared memory that a process gives up count for none and stay.
        ("import mmap; mmap.mmap(-1, 1 << 20)", "Function not implemented"),
        ("import mmap, os; mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)", "No such device"),
        ("import mmap; mmap.mmap(-1, 32 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)", "Cannot allocate memory"),
        (
            "import socket as s; s.socketpair()[0].setsockopt(s.SOL_SOCKET, s.SO_SNDBUF, 1 << 20)",
            "Function not implemented",
        ),
        (
            "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.semget(0, 32000, 0o600)\n"
            "raise OSError(os.strerror(ctypes.get_errno()))",
            "Function not implemented",
        ),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import os; os.chroot('/tmp')", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_NPROC, (9999, 9999))", "ValueError"),
        ("import socket; socket.create_connection(('1.1.1.1', 53), 5)", "Network is unreachable"),
        ("import socket; socket.socket(socket.AF_VSOCK)", "Function not implemented"),
        ("import socket; socket.socket(socket.AF_ALG, 5)", "Function not implemented"),
    ],
)
async def test_what_is_not_allowed_fails(program: str, error: str) -> None:
    finished = await python(program)
    assert (finished.status, finished.stopped_by) == (1, "")
    assert error in finished.stderr.decode()


ORDINARY = """\
import asyncio, mmap, multiprocessing, threading
async def say():
    process = await asyncio.create_subprocess_exec("head", "-c", "3", "/dev/zero", stdout=-1)
    return (await process.communicate())[0]
def double(x): return 2 * x
assert asyncio.run(say()) == bytes(3)
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool: assert pool.map(double, [1, 2]) == [2, 4]
value = context.Value("i", 0)
def add():
    with value.get_lock(): value.value += 1
workers = [kind(target=add) for kind in (threading.Thread, context.Process) for _ in range(2)]
for each in workers: each.start()
for each in workers: each.join()
mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).write(b"x")
print(value.value)
"""


async def test_asyncio_threads_and_forked_processes_work() -> None:
    finished = await python(ORDINARY)
    assert (finished.stdout, finished.stderr, finished.stopped_by) == (b"4\n", b"", "")


async def test_further_namespaces_are_refused() -> None:
    finished = await run("unshare", "--user", "true")
    assert finished.status == 1
    assert b"Function not implemented" in finished.stderr


async def test_no_file_and_no_secret_of_the_run_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "planted-secret")
    secret = tmp_path / "run.json"
    secret.write_text("planted-secret")
    found = []
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        for script in (
            f"cat {secret}",
            f"ln -s {secret} link; cat link",
            f"cd /proc/1/root && cat .{secret}",
            "env",
            "cat /proc/*/environ",
            f"ls {Path.cwd()} {Path.home()}/.ssh /etc/passwd /sys /run /var",
            "ls -A /tmp",
        ):
            done = await sandbox.run(["sh", "-c", script])
            found.append(done.stdout + done.stderr)
    text = b"".join(found)
    assert b"planted-secret" not in text
    assert b"PLANTED" not in text
    assert b"PATH=" in text
    assert found[-1] == b"link\n"


def test_nothing_that_is_written_is_outside(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = tmp_path / "target"
    target.write_text("as it was")
    target.chmod(0o666)
    name = f"rollmill-planted-{os.getpid()}"
    script = f"echo x > /tmp/{name}; echo x > /dev/shm/{name}; ln -s {target} link; echo x > link; mkdir -p {tmp_path}/new"
    asyncio.run(run("sh", "-c", script))
    assert target.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [target]
    assert not Path("/tmp", name).exists()
    assert not Path("/dev/shm", name).exists()


async def test_files_stay_until_the_sandbox_ends_and_processes_end_with_their_command() -> None:
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        first = await sandbox.run(
            ["sh", "-c", "echo kept > file; setsid sleep 1000 & sleep 1000 & echo started"]
        )
        second = await sandbox.run(["sh", "-c", "cat file; ls /proc | grep -c '^[0-9]'"])
    assert (first.stdout, first.stopped_by) == (b"started\n", "")
    # Process 1, sh, ls and grep.
    assert second.stdout == b"kept\n4\n"
    assert (await run("ls")).stdout == b""


async def test_a_program_cannot_end_the_first_process_or_answer_for_it() -> None:
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        script = "for i in $(seq 64); do kill -$i 1; done; kill -9 -1; for i in /proc/*/fd/*; do echo forged > $i; done"
        await sandbox.run(["sh", "-c", script])
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"


async def test_a_signal_that_the_first_process_could_handle_does_not_end_it() -> None:
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        await sandbox.run(["python3", "-c", "import os, signal; os.kill(1, signal.SIGINT)"])
        assert (await sandbox.run(["echo", "alive"])).stdout == b"alive\n"


async def test_commands_that_are_given_at_once_run_one_after_another() -> None:
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        script = "test -e running && echo both; touch running; sleep 0.2; rm running"
        both = await asyncio.gather(*(sandbox.run(["sh", "-c", script]) for _ in range(2)))
    assert [each.stdout for each in both] == [b"", b""]


async def test_seconds_of_cpu_have_no_limit_since_those_of_all_threads_add_up() -> None:
    assert (await run("sh", "-c", "ulimit -t")).stdout == b"unlimited\n"


def test_a_folder_below_tmp_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "library").write_text("there")
    tmp_path.chmod(0o755)
    config = CONFIG.model_copy(update={"paths": (str(tmp_path),)})
    script = f"cat {tmp_path}/library; touch /tmp/own && echo ' ' own; touch {tmp_path}/new"
    finished = asyncio.run(run("sh", "-c", script, config=config))
    assert finished.stdout == b"there  own\n"
    assert [each.name for each in tmp_path.iterdir()] == ["library"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["closed", "killed"])
def test_an_unsafe_command_ends_with_its_sandbox(ending: str) -> None:
    program = UNSAFE_OWNER if ending == "closed" else OWNER.replace("timeout_s", "unsafe=True, timeout_s")
    program = program.replace("setsid sleep", "sleep")
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    wait_until(lambda: len(find_sleepers()) >= 2)
    if ending == "killed":
        owner.kill()
    else:
        assert owner.stdout.readline() == b"closed\n"
    wait_until(lambda: not find_sleepers(), timeout_s=10.0)
    owner.kill()
    owner.wait()


@pytest.mark.slow
async def test_what_a_sandbox_with_too_many_files_holds_is_gone_with_it() -> None:
    config = CONFIG.model_copy(update={"timeout_s": 60.0})
    async with open_sandbox("sandbox", config) as sandbox:
        script = f"for i in range({MAX_FILES + 1000}): open(str(i), 'w').close()\nimport time; time.sleep(60)"
        assert (await sandbox.run(["python3", "-I", "-S", "-c", script])).stopped_by == "files"
        with pytest.raises(Exception, match="the sandbox has ended"):
            await sandbox.run(["true"])


async def test_input_and_output_of_a_mebibyte_pass_and_a_missing_program_says_so() -> None:
    content = os.urandom(OUTPUT_BYTES)
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        assert (await sandbox.run(["cat"], content)).stdout == content
        # A command that does not read its input ends all the same.
        assert (await sandbox.run(["true"], content)).has_succeeded
        missing = await sandbox.run(["no-such-program"])
    assert (missing.status, missing.stderr) == (
        127,
        b"cannot run no-such-program: No such file or directory\n",
    )


async def test_a_cancelled_command_ends_with_its_sandbox() -> None:
    async with open_sandbox("sandbox", CONFIG) as sandbox:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.run(["sleep", "1000"])
        with pytest.raises(Exception, match="the sandbox has ended"):
            await sandbox.run(["true"])


OWNER = """\
import asyncio
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.sandbox import open_sandbox

async def main():
    async with open_sandbox("sandbox", SandboxConfig(timeout_s=1000)) as sandbox:
        await sandbox.run(["true"])
        print("ready", flush=True)
        await sandbox.run(["sh", "-c", "setsid sleep 86399.5 & sleep 86399.5"])

asyncio.run(main())
"""


UNSAFE_OWNER = """\
import asyncio
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.sandbox import open_sandbox

async def main():
    async with open_sandbox("sandbox", SandboxConfig(unsafe=True, timeout_s=1000)) as sandbox:
        await sandbox.run(["true"])
        print("ready", flush=True)
        command = asyncio.create_task(sandbox.run(["sh", "-c", "sleep 86399.5 & sleep 86399.5"]))
        await asyncio.sleep(2.0)
        command.cancel()
    print("closed", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_sandbox_ends_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    wait_until(lambda: len(find_sleepers()) >= 2)
    owner.kill()
    owner.wait()
    wait_until(lambda: not find_sleepers())


def find_sleepers() -> Sequence[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [int(place.parent.name)] * (words[:2] == [b"sleep", b"86399.5"])
    return found


def wait_until(condition: object, timeout_s: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root all tests here are of a user without rights")
def test_a_user_without_rights_has_the_same_limits() -> None:
    """For root a sandbox is made otherwise, so that of a user is tried as another user, with the system's Python."""
    command = sandbox_command(CONFIG, "/usr", is_root=False)
    if not Path(command[command.index("--") + 1]).exists():
        pytest.skip("the system has another version of Python")
    script = "id -u; cat /proc/1/environ; for i in $(seq 100); do sleep 60 & done"
    words = b"\0".join([b"sh", b"-c", script.encode()])
    with pass_filter(command) as (filtered, descriptors):
        process = subprocess.Popen(
            filtered,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=54321,
            group=54321,
            extra_groups=[],
            cwd="/",
            pass_fds=descriptors,
        )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(REQUEST.pack(8.0, len(words), 0) + words)
        process.stdin.flush()
        header = process.stdout.read(ANSWER.size)
        assert header, process.stderr and process.stderr.read()
        status, limit, _, n_out, n_err = ANSWER.unpack(header)
        out, err = process.stdout.read(n_out), process.stdout.read(n_err)
        process.stdin.close()
    assert (status, limit, out) == (2, 0, b"54321\n")
    assert b"/proc/1/environ: Permission denied" in err
    assert b"Cannot fork" in err
