"""Where no sandbox can start, a run ends before its start, with the remedy; none of this needs the kernel's permission."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from rollmill.tasks.errors import ConfigError, SandboxError
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import make_environment
from rollmill.tasks.sandbox.bubblewrap import find_remedy
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.sandbox import ConfigurableSandbox, Sandbox, check_sandbox, open_sandbox
from rollmill.tasks.sandbox.system_calls import _NAMES, _REFUSED, make_filter
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.terms import check_scorer


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without bubblewrap; returns the folder, which is all of it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


# What was found is kept by settings, so each test has its own.
def test_without_bubblewrap_the_scorer_is_refused_with_the_package(no_program: Path) -> None:
    config = ScoreConfig(scorer="code", sandbox=SandboxConfig(timeout_s=1.1))
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*score\.sandbox\.unsafe=true") as raised:
        check_scorer(config)
    assert raised.value.field == "score.sandbox.unsafe"


def test_without_bubblewrap_the_environment_is_refused_with_the_package(no_program: Path) -> None:
    config = RolloutConfig(environment="shell", sandbox=SandboxConfig(timeout_s=1.2))
    with pytest.raises(ConfigError, match=r"apt install bubblewrap.*rollout\.sandbox\.unsafe=true"):
        make_environment(config)


def test_an_error_of_bubblewrap_is_quoted(no_program: Path) -> None:
    fake = no_program / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o700)
    with pytest.raises(ConfigError, match="No permissions to create new namespace"):
        check_sandbox("score.sandbox", SandboxConfig(timeout_s=1.3))


@pytest.mark.parametrize(
    ("text", "name", "value", "remedy"),
    [
        ("bwrap: Unknown option --size", "", "", "bubblewrap 0.8"),
        ("denied", "user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
        ("denied", "kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("denied", "kernel/apparmor_restrict_unprivileged_userns", "1", "restrict_unprivileged_userns=0"),
        ("denied", "kernel/unprivileged_userns_clone", "1", "seccomp=unconfined"),
    ],
)
def test_the_remedy_follows_the_kernels_settings(
    tmp_path: Path, text: str, name: str, value: str, remedy: str
) -> None:
    if name:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"{value}\n")
    assert remedy in find_remedy(text, tmp_path)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="absolute path") as raised:
        check_sandbox("score.sandbox", SandboxConfig(paths=("/no/such/folder",), unsafe=True))
    assert raised.value.field == "score.sandbox.paths"


def test_a_machine_whose_system_calls_are_not_known_is_refused() -> None:
    with pytest.raises(SandboxError, match="x86_64 and aarch64, not 'riscv64'"):
        make_filter("riscv64")


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not here")
    numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    assert [numbers[name] for name in _NAMES] == [str(each) for each in _REFUSED[machine]]


async def test_an_unsafe_sandbox_needs_no_bubblewrap_and_keeps_its_limits(
    no_program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", "planted-secret")
    config = SandboxConfig(unsafe=True, timeout_s=2.0)
    check_sandbox("sandbox", config)
    async with open_sandbox("sandbox", config) as sandbox:
        first = await sandbox.run(["sh", "-c", "pwd; env; echo x > file"])
        folder = Path(first.stdout.decode().splitlines()[0])
        assert (folder / "file").exists()
        assert b"planted" not in first.stdout
        assert (await sandbox.run(["yes"])).stopped_by == "output"
        assert (await sandbox.run(["cat", "file"])).stdout == b"x\n"
    assert not folder.exists()  # noqa: ASYNC240 - of a test


async def test_a_provider_of_ones_own_is_used_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    config = SandboxConfig(provider="own_sandbox:Recorder", timeout_s=7.0)
    check_sandbox("sandbox", config)
    async with open_sandbox("sandbox", config) as sandbox:
        assert (await sandbox.run(["echo", "1"])).stdout == b"echo 1 within 7 s"
    assert sandbox.is_closed  # type: ignore[attr-defined]


def test_a_provider_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="No module named 'no_such_package'") as raised:
        check_sandbox("score.sandbox", SandboxConfig(provider="no_such_package:Sandbox"))
    assert raised.value.field == "score.sandbox.provider"
    with pytest.raises(ConfigError, match="set it to false"):
        check_sandbox("score.sandbox", SandboxConfig(provider="own_sandbox:Recorder", unsafe=True))


async def test_the_examples_of_the_documentation_work() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "sandbox.md").read_text()
    provider, use = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(provider + use, names)
    for method in ("run", "close"):
        ours, theirs = (inspect.signature(getattr(each, method)) for each in (Sandbox, names["Containers"]))
        assert str(ours) == str(theirs)
    assert isinstance(names["Containers"], ConfigurableSandbox)
    config = SandboxConfig(unsafe=True)
    assert await names["doubles"]("print(2 * int(input()))", config)
    assert not await names["doubles"]("print(int(input()))", config)
