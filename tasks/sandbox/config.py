"""Settings of the sandboxes in which code and commands of the model run."""

from rollmill.tasks.config import YEAR_S, StageConfig, setting

MIB = 1 << 20


class SandboxConfig(StageConfig):
    """Where code and commands of the model run, and how much they may use."""

    provider: str = setting(
        "bubblewrap",
        "What makes a sandbox: bubblewrap, or the import path package.module:Class of your own (docs/how-to/sandbox.md).",
        fixed=True,
    )
    timeout_s: float = setting(
        10.0,
        "Time limit of one program or command, in seconds.",
        gt=0.0,
        le=YEAR_S,
        fixed=True,
    )
    memory_bytes: int = setting(
        512 * MIB,
        "Memory that all processes of a sandbox may use together, in bytes, and the size of its file system, which is in memory too.",
        ge=32 * MIB,
        fixed=True,
    )
    paths: tuple[str, ...] = setting(
        (),
        "Further folders of this machine that can be read in a sandbox, such as an environment with numpy; `bin` in them precedes "
        "the other programs.",
        fixed=True,
    )
    unsafe: bool = setting(
        False,
        "Run code and commands of the model without a sandbox: under your user, with your files and the network.",
    )
