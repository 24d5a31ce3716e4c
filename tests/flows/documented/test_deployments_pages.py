"""The pages on deployments and promotion, one command after another: a worker executes each flow run that they create."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import patient
import pytest
import yaml
from page_scene import Scene

from tests.documentation.page_commands import ROOT, Command, commands_run_by

pytestmark = pytest.mark.service
LONGEST_S = 600.0
OVER = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
FLOW_RUN = re.compile(r"flow-run/([0-9a-f-]{36})")


@pytest.fixture(scope="module")
def scene(open_scene, tied_model: Path, prefect_api: str) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    """A folder as a clone has it; the policy of the run `first` is in production once there is one."""

    def finish(scene: Scene, command: Command, printed: str) -> None:
        for flow_run in FLOW_RUN.findall(printed):
            assert wait_until_over(prefect_api, flow_run) == "COMPLETED", printed
        if "--name first" in command.text:
            policy = "runs/first/policies/version=000002"
            scene.prepare(f"rollmill gate {policy} --min-reward 0")
            scene.prepare(f"rollmill promote --yes {policy}")

    values = {"steps": 2, "checkpoint": {"every": 1, "export_every": 1}, "evaluate": {"n_prompts": 64}}
    with open_scene(__file__, values, {"PREFECT_WORKER_QUERY_SECONDS": "1"}, finish) as scene:
        conf = scene.folder / "conf"
        small = yaml.safe_load((conf / "quickstart.yaml").read_text())
        shutil.copytree(ROOT / "conf", conf, dirs_exist_ok=True)
        (conf / "quickstart.yaml").write_text(yaml.safe_dump(small))
        for name in ("Makefile", "prefect.yaml"):
            shutil.copy(ROOT / name, scene.folder)
        (scene.folder / "models" / "mine").symlink_to(tied_model)
        yield scene


def wait_until_over(api: str, flow_run: str) -> str:
    """The state of a flow run once it is over; one that waits for a person is approved."""
    deadline = time.monotonic() + LONGEST_S
    while True:
        found = patient.get(f"{api}/flow_runs/{flow_run}").json()
        if found["state_type"] in OVER:
            return str(found["state_type"])
        if found["state_type"] == "PAUSED":
            answer = {"approve": True, "approved_by": "ada", "note": ""}
            patient.post(f"{api}/flow_runs/{flow_run}/resume", json={"run_input": answer})
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)


def test_the_policy_that_was_approved_is_in_production(scene: Scene) -> None:
    scene.run(commands_run_by(__file__)[-1])
    production = scene.folder / "policies" / "production"
    assert production.resolve() == scene.folder / "runs" / "second" / "policies" / "version=000002"
