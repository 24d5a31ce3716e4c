"""prefect.yaml: its parameters fit the flows' forms, its job variables the work pools; and what deploying says."""

import asyncio
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools.validation import validate
from prefect.workers.utilities import get_default_base_job_template_for_infrastructure_type

from rollmill.flows import cli
from rollmill.flows.prefect_integration.deployments import preset, render_deployments
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.python_child import python_command

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text())
POOLS: dict[str, dict[str, Any]] = DOCUMENT["definitions"]["pools"]
DEPLOYMENTS: list[dict[str, Any]] = DOCUMENT["deployments"]
NAMES = [f"{each['entrypoint'].split('.')[1]}/{each['name']}" for each in DEPLOYMENTS]


def parameters_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """What the deployment is given, its build step carried out."""
    (step,) = [each for each in deployment["build"] if "id" in next(iter(each.values()))]
    ((name, arguments),) = step.items()
    assert deployment["parameters"]["config"] == f"{{{{ {arguments.pop('id')}.config }}}}"
    return deployment["parameters"] | {"config": import_object(name)(**arguments)["config"]}


SETTLED = [each for each in DEPLOYMENTS if "config" in each["parameters"]]


def test_the_deployment_of_promote_asks_for_a_candidate() -> None:
    (deployment,) = [each for each in DEPLOYMENTS if each not in SETTLED]
    schema = parameter_schema(load_flow_from_entrypoint(deployment["entrypoint"])).model_dump()
    assert [error.message for error in validate(deployment["parameters"], schema)] == [
        "'candidate' is a required property"
    ]
    given = deployment["parameters"] | {"candidate": "policies/new"}
    assert validate(given, schema) == []
    assert validate(given | {"error_rate": 1.5}, schema) != []


@pytest.mark.parametrize("deployment", SETTLED, ids=NAMES[: len(SETTLED)])
def test_a_deployment_fills_in_run_name_and_a_config_that_its_form_takes(
    deployment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    deployment = yaml.safe_load(yaml.safe_dump(deployment))
    schema = parameter_schema(load_flow_from_entrypoint(deployment["entrypoint"])).model_dump()
    assert list(schema["properties"])[:2] == ["run_name", "config"]
    parameters = parameters_of(deployment)
    assert validate(parameters, schema) == []
    parameters["config"]["advanced"]["store"]["compaction_grace_s"] = -1
    assert [error.message for error in validate(parameters, schema)] == ["-1 is less than the minimum of 0.1"]
    assert deployment["description"]
    assert "rollmill" in deployment["tags"]


def wrong_variables(kind: str, variables: dict[str, Any]) -> list[str]:
    """What is wrong with job variables, by the default base job template of a work pool of that kind."""
    template = asyncio.run(get_default_base_job_template_for_infrastructure_type(kind))
    assert template is not None
    schema = template["variables"] | {"additionalProperties": False}
    return [error.message for error in validate(variables, schema)]


@pytest.mark.parametrize("kind", POOLS)
def test_job_variables_are_those_that_the_kind_of_work_pool_has(kind: str) -> None:
    assert wrong_variables(kind, POOLS[kind]["job_variables"]) == []


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_an_images_run_is_the_engine_itself_in_the_images_folder(kind: str) -> None:
    _, *words = shlex.split(POOLS[kind]["job_variables"]["command"])
    assert words == python_command("prefect.engine")[1:]


def test_a_job_variable_that_a_work_pool_lacks_or_takes_otherwise_is_found() -> None:
    assert wrong_variables("docker", {"working_dir": "here"})
    assert wrong_variables("kubernetes", {"image": 3})


def test_containers_get_what_docker_can_make_of_the_job_variables() -> None:
    from docker.types import HostConfig

    arguments = POOLS["docker"]["job_variables"]["container_create_kwargs"]
    made = HostConfig(version="1.44", **arguments)
    assert made["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert made["ShmSize"] == 8 << 30


def test_all_deployments_go_to_the_pool_that_is_asked_for_and_keep_their_queues() -> None:
    placed = render_deployments(DOCUMENT, "docker", ["serve.urls=[http://h:1]"])["deployments"]
    pools = [each["work_pool"] for each in placed]
    assert {each["name"] for each in pools} == {"rollmill-docker"}
    queues = [each["work_pool"]["work_queue_name"] for each in DEPLOYMENTS]
    assert [each["work_queue_name"] for each in pools] == queues
    steps = {
        name: step[name] for each in placed for step in each["build"] for name in step if "limit" in name
    }
    assert {step["pool"] for step in steps.values()} == {"rollmill-docker"}
    presets = [
        step
        for each in placed
        for step in each["build"]
        if "rollmill.flows.prefect_integration.deployments.preset" in step
    ]
    assert all(
        "serve.urls=[http://h:1]"
        in each["rollmill.flows.prefect_integration.deployments.preset"]["overrides"]
        for each in presets
    )


def test_a_pool_that_is_not_in_the_file_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="process, docker, kubernetes"):
        render_deployments(DOCUMENT, "slurm")


def read_refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What a command says that refuses a wrong setting."""
    monkeypatch.setattr("sys.argv", ["rollmill", *words])
    with pytest.raises(SystemExit) as end:
        cli.run_command()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_deploying_outside_of_a_checkout_is_an_error_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "prefect.yaml is missing in this folder; run the command in a checkout" in read_refusal(
        capsys, monkeypatch, "deploy"
    )
    (tmp_path / "prefect.yaml").write_text("a: [")
    (tmp_path / "conf").mkdir()
    assert "it is not YAML" in read_refusal(capsys, monkeypatch, "deploy")
    for foreign in ("", "[]", "deployments: []", "definitions: {pools: {}}\ndeployments: 3"):
        (tmp_path / "prefect.yaml").write_text(foreign)
        assert "it lacks definitions.pools" in read_refusal(capsys, monkeypatch, "deploy")


def test_a_deployment_of_another_flow_without_build_steps_is_placed_too() -> None:
    own = {"name": "mine", "entrypoint": "mine.py:mine", "parameters": {}}
    document = DOCUMENT | {"deployments": [own, own | {"build": None, "work_pool": {"name": "other"}}]}
    placed = render_deployments(document, "process")["deployments"]
    assert [each["work_pool"]["name"] for each in placed] == ["rollmill", "rollmill"]
    assert [each["build"] for each in placed] == [[], []]


def test_build_steps_that_are_not_rollmills_stay_as_they_are() -> None:
    shell = {"prefect.deployments.steps.run_shell_script": {"id": "made", "script": "make"}}
    own = {"name": "mine", "entrypoint": "mine.py:mine", "build": [shell, {"mine.prepare": None}]}
    placed = render_deployments(DOCUMENT | {"deployments": [own]}, "process", ["steps=2"])["deployments"]
    assert placed[0]["build"] == own["build"]


def test_a_deployed_teacher_has_the_number_format_of_the_machine_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(
        "model: m\nrollout: {environment: addition}\nscore: {scorer: addition}\n"
    )
    assert "dtype" not in preset("own", flow="annotate")["config"]["advanced"]["serve"]
    given = preset("own", ("serve.dtype=float32",), "annotate")
    assert given["config"]["advanced"]["serve"]["dtype"] == "float32"


@pytest.mark.parametrize("words", [["deploy"], ["run", "quickstart", "--deployment"]])
def test_a_missing_prefect_server_is_an_error_with_its_remedy(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    error = read_refusal(capsys, monkeypatch, *words)
    assert "PREFECT_API_URL = 'http://127.0.0.1:9/api': nothing answers there" in error
    assert "start that server, correct the address, or unset it" in error
