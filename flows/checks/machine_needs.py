"""What a run needs of this machine: a folder to store it in, environments, a compiler, addresses and ports."""

import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.tasks.config import check_extra
from rollmill.tasks.errors import MAX_VALUE_CHARACTERS, ConfigError
from rollmill.tasks.serve.vllm_launch import check_guarded, check_python, is_cpu_build
from rollmill.tasks.store.folders import S3_SCHEME, SCRATCH_ENV, RunFolder


def check_store(root: str) -> None:
    """Refuse a `store.root` that runs cannot be stored in; ConfigError gives the reason."""
    if not root or root.startswith("~") or (re.match(r"\w+:/", root) and not root.startswith(S3_SCHEME)):
        remedy = "give a folder on a local disk, without ~, or s3://bucket/prefix"
        raise ConfigError("store.root", root, remedy)
    if not root.startswith(S3_SCHEME):
        check_folder("store.root", root)
        return
    # s3fs and botocore are slow to import.
    from rollmill.tasks.store.s3.s3_files import check_s3

    check_s3(root)
    check_folder(SCRATCH_ENV, str(RunFolder(root).local))


def check_folder(field: str, value: str) -> None:
    """Refuse a folder that cannot be created or written to."""
    # The folder is created later, below the first folder that exists.
    nearest = Path(value).absolute()
    try:
        while not nearest.exists():
            nearest = nearest.parent
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        remedy = f"cannot write to {str(nearest)[:MAX_VALUE_CHARACTERS]} ({error.strerror}); give a folder that this user may write to"
        raise ConfigError(field, value, remedy) from None


def check_vllm(config: RunConfig) -> None:
    """Check what launching vLLM servers needs, an environment with vLLM above all; ConfigError names what is missing."""
    check_python(config.serve)
    check_guarded(config.serve)
    if config.rollout.keep_routing and is_cpu_build(config.serve.python):
        remedy = "vLLM returns routed experts only on GPUs, and serve.python has its CPU build"
        raise ConfigError("rollout.keep_routing", True, remedy)
    if config.serve.sleep and is_cpu_build(config.serve.python):
        raise ConfigError("serve.sleep", True, "vLLM sleeps only on GPUs, and serve.python has its CPU build")


def check_trainer() -> None:
    """Check what launching a trainer needs, its libraries and a C++ compiler; ConfigError says how to get what is missing."""
    check_extra("trainer", "", "deepspeed", "trainer")
    # DeepSpeed's build takes CXX, then c++ or g++.
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        remedy = (
            "DeepSpeed builds an extension at first use: install a C++ compiler (Debian: apt-get install g++)"
        )
        raise ConfigError("C++ compiler", compiler, remedy)


def check_address(field: str, host: str) -> None:
    """Raise ConfigError, which names a setting or an option, if this machine cannot listen at an address or a host's name."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            field, host, f"it is no address of this machine ({reason}); give one that is"
        ) from None


def check_port(port: int) -> None:
    """Raise ConfigError, which names the option --port, if a loopback port is taken; 0 means any free port and passes."""
    if not port:
        return
    with socket.socket() as probe:
        # A port of connections that have just closed counts as free, as it does for servers.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            remedy = f"the port is taken ({error.strerror}); give another, or 0 for any"
            raise ConfigError("--port", port, remedy) from None
