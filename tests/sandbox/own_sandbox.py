"""A provider of sandboxes that runs nothing, as one of another package would be named by its import path."""

from collections.abc import Sequence

from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.sandbox.finished import Finished


class Recorder:
    def __init__(self, config: SandboxConfig) -> None:
        self.config, self.is_closed = config, False

    @classmethod
    def from_config(cls, config: SandboxConfig) -> "Recorder":
        return cls(config)

    async def run(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None
    ) -> Finished:
        text = f"{' '.join(command)} within {self.config.timeout_s:g} s"
        return Finished(0, text.encode(), b"")

    async def close(self) -> None:
        self.is_closed = True
