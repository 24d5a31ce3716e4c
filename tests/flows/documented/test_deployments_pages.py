"""The pages on deployments and promotion, one command after another: a worker executes each flow run that they create."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from page_scene import Scene, finish_flow_runs

from tests.documentation.page_commands import ROOT, Command, commands_run_by

pytestmark = [pytest.mark.service, pytest.mark.long]


@pytest.fixture(scope="module")
def scene(open_scene, tied_model: Path, prefect_api: str) -> Iterator[Scene]:  # type: ignore[no-untyped-def]
    """A folder as a clone has it; the policy of the run `first` is in production once there is one."""

    def finish(scene: Scene, command: Command, printed: str) -> None:
        finish_flow_runs(prefect_api, printed)
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


@pytest.mark.parametrize("command", commands_run_by(__file__), ids=str)
def test_a_documented_command_does_what_it_is_there_for(scene: Scene, command: Command) -> None:
    scene.run(command)


def test_the_policy_that_was_approved_is_in_production(scene: Scene) -> None:
    scene.run(commands_run_by(__file__)[-1])
    production = scene.folder / "policies" / "production"
    assert production.resolve() == scene.folder / "runs" / "second" / "policies" / "version=000002"
