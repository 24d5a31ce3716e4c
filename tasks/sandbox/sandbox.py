"""The interface of a sandbox, and how to open the configured one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from rollmill.tasks.config import create_named, guard_named, import_named
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.sandbox.bubblewrap import Bubblewrap, check_bubblewrap
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.finished import Finished

BUBBLEWRAP = "bubblewrap"
_PROVIDERS = {BUBBLEWRAP: "rollmill.tasks.sandbox.bubblewrap:Bubblewrap"}


class Sandbox(Protocol):
    """A place with separate files in which commands run that are not trusted. It starts at the first command."""

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None
    ) -> Finished:
        """Run a command and return how it ended. Files that it leaves are there for the next one, processes are ended.

        Args:
            command: program and arguments.
            stdin: its standard input.
            timeout_s: its time limit in seconds, if that is shorter than the configured one.

        Raises:
            SandboxError: the sandbox cannot be started, or has ended.
        """

    async def close(self) -> None:
        """End the sandbox with all its processes and files; called once, however its use ended."""


@runtime_checkable
class ConfigurableSandbox(Protocol):
    """A class of sandboxes that is created from the settings; others are created without arguments."""

    def from_config(self, config: SandboxConfig) -> Sandbox:
        """Create a sandbox, without starting it."""


def check_sandbox(field: str, config: SandboxConfig) -> None:
    """Refuse settings with which no sandbox can be used on this machine.

    Args:
        field: the section of the settings, such as score.sandbox.
        config: the section.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    if config.provider == BUBBLEWRAP:
        check_bubblewrap(field, config)
    elif config.unsafe:
        remedy = f"{field}.provider = {config.provider!r} makes the sandbox; set it to false"
        raise ConfigError(f"{field}.unsafe", True, remedy)
    else:
        _create(field, config)


def _create(field: str, config: SandboxConfig) -> Sandbox:
    if config.provider == BUBBLEWRAP:
        return Bubblewrap(config)
    name = f"{field}.provider"
    factory = import_named(name, config.provider, _PROVIDERS)
    if isinstance(factory, ConfigurableSandbox):
        with guard_named(name, config.provider, _PROVIDERS):
            return factory.from_config(config)
    made: Sandbox = create_named(name, config.provider, _PROVIDERS)
    return made


@asynccontextmanager
async def open_sandbox(field: str, config: SandboxConfig) -> AsyncIterator[Sandbox]:
    """Open the configured sandbox; it ends with this context. Arguments as for `check_sandbox`.

    Raises:
        ConfigError: there is no such provider.
    """
    sandbox = _create(field, config)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def write_file(sandbox: Sandbox, path: str, content: bytes) -> Finished:
    """Write a file in a sandbox, with its folders."""
    return await sandbox.run(["sh", "-c", 'mkdir -p "$(dirname -- "$1")" && cat > "$1"', "sh", path], content)
