"""Run a Python module in a child process so that no file of the working folder shadows another module.

`python -m MODULE` puts the working folder first on `sys.path`: a user's queue.py would replace the standard library's
module. A child that `python_command` starts finds the working folder last, after the standard library and the
installed packages, so a user's own environment, scorer or loss can still be imported from there.
"""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable that keeps the working folder off `sys.path` in every Python below; for commands
that start `python -m` themselves."""
USER_PATH = "ROLLMILL_USER_PATH"
"""Environment variable with the folders that a child appends to `sys.path`."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `module` with `arguments` in this interpreter; see `child_environment`."""
    return [sys.executable, "-P", "-m", "rollmill.tasks.processes.python_child", module, *arguments]


def child_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `base` and a variable with this process's module folders, so that a child process finds user code too."""
    folders = [str(Path(each).absolute()) for each in sys.path]
    return {**base, USER_PATH: os.pathsep.join(folders)}


def append_user_path() -> None:
    """Append the parent process's module folders and the working folder to `sys.path`, after its entries."""
    folders = [*os.environ.get(USER_PATH, "").split(os.pathsep), str(Path.cwd())]
    sys.path += [each for each in dict.fromkeys(folders) if each and each not in sys.path]


def main() -> None:
    """Run the module that is the first command-line argument, as `python -m` would, with the user's module folders added."""
    append_user_path()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
