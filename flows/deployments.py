"""The flows as deployments of a Prefect server: what prefect.yaml fills in, and how it is put there."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows import server
from flows.settings import load
from tasks.errors import ServiceError

POOL = "rollmill"


def preset(name: str) -> dict[str, Any]:
    """A preset as deployments have it: a build step of prefect.yaml.

    Returns:
        `config`: the flow's parameter, all settings resolved; `folder`: where relative paths begin.
    """
    return {"config": load(name).model_dump(mode="json"), "folder": str(Path.cwd())}


def deploy_all() -> None:
    """Make the work pool unless it is there, and deploy all of prefect.yaml.

    Raises:
        ConfigError, ServiceStartError: there is no Prefect server.
        ServiceError: Prefect refused.
    """
    api = server.ensure()
    environment = os.environ | {"PREFECT_API_URL": api, "PREFECT_CLI_PROMPT": "false"}
    for words in (
        ("work-pool", "create", POOL, "--type", "process", "--overwrite"),
        ("deploy", "--all"),
    ):
        command = [sys.executable, "-m", "prefect", *words]
        if subprocess.run(command, env=environment, check=False).returncode:
            raise ServiceError("Prefect", f"`prefect {' '.join(words)}` failed; its output is above")
