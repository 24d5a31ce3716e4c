"""Whether this machine lets sandboxes start: tests that need one are skipped with the reason elsewhere."""

import pytest

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.sandbox.bubblewrap import check_bubblewrap
from rollmill.tasks.sandbox.config import SandboxConfig


def find_obstacle() -> str:
    """Why no sandbox can start here; empty if one can."""
    try:
        check_bubblewrap("sandbox", SandboxConfig())
    except ConfigError as error:
        return error.remedy
    return ""


OBSTACLE = find_obstacle()
needs_sandbox = pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
