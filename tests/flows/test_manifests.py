"""compose.yaml, deploy/kubernetes and the Dockerfile say what their formats allow, and agree with the code."""

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from kubernetes_validate import ValidationError
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from benchmarks.stubs.prefect_cluster import settings_of
from flows.settings import load
from tasks.serve import vllm

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
KUBERNETES_VERSION = "1.32"
SECRETS = ROOT / "deploy" / "secrets.example"
PORT_OF_TRAINER = 8700


@functools.cache
def parsed() -> list[dict[str, Any]]:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [each for name in listed for each in yaml.safe_load_all((KUBERNETES / name).read_text())]


def manifests() -> list[dict[str, Any]]:
    """Every resource of the files that kustomization.yaml lists, to do with as one likes."""
    return copy.deepcopy(parsed())


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def check_manifest(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in manifests():
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]


@pytest.mark.parametrize(
    "resource", [pytest.param(each, id=f"{each['kind']} {each['metadata']['name']}") for each in manifests()]
)
def test_every_kubernetes_resource_is_valid(resource: dict[str, Any]) -> None:
    check_manifest(resource)


@pytest.mark.parametrize(
    ("field", "value"), [("replica", 2), ("replicas", "two"), ("template", {"spec": {"container": []}})]
)
def test_a_wrong_field_of_a_kubernetes_resource_is_found(field: str, value: object) -> None:
    resource = manifest("StatefulSet", "vllm")
    resource["spec"][field] = value
    with pytest.raises(ValidationError):
        check_manifest(resource)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
def test_kustomize_builds_valid_resources_that_find_their_settings() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, check=True, text=True
    ).stdout
    resources = list(yaml.safe_load_all(built))
    for each in resources:
        check_manifest(each)
    maps = {each["metadata"]["name"] for each in resources if each["kind"] == "ConfigMap"}
    named = set(re.findall(r"configMap(?:Ref)?:\n +name: (\S+)", built))
    assert named == maps


def test_every_pod_runs_as_a_user_without_rights() -> None:
    for name, pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert not container["securityContext"]["allowPrivilegeEscalation"], name


def test_every_service_of_kubernetes_finds_its_pods() -> None:
    labels = [pod["metadata"]["labels"] for _, pod in pods()]
    services = [each for each in manifests() if each["kind"] == "Service"]
    assert len(services) == 6
    for each in services:
        assert any(each["spec"]["selector"].items() <= label.items() for label in labels), each["metadata"]


def test_every_kubernetes_pod_is_closed_but_to_whom_a_policy_names() -> None:
    policies = {
        each["metadata"]["name"]: each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    for name, callers in {"vllm": {"run", "trainer"}, "trainer": {"run", "vllm"}}.items():
        assert policies[name]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        allowed = [
            origin["podSelector"]["matchLabels"]
            for rule in policies[name]["ingress"]
            for origin in rule["from"]
        ]
        assert {each["app.kubernetes.io/name"] for each in allowed} == callers


async def test_a_flow_run_in_kubernetes_is_a_valid_job_that_the_policies_know() -> None:
    template = json.loads((KUBERNETES / "pool.json").read_text())
    job = await KubernetesWorkerJobConfiguration.from_template_and_values(
        template, {"env": {"ONE": "1"}, "cpu_limit": "8"}, client=PrefectClient("http://nobody.invalid/api")
    )
    job.prepare_for_flow_run(FlowRun(id=uuid.uuid4(), flow_id=uuid.uuid4(), name="a run"))
    check_manifest(job.job_manifest)
    pod = job.job_manifest["spec"]["template"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "run"
    (container,) = pod["spec"]["containers"]
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert {"name": "ONE", "value": "1"} in container["env"]


def compose(*others: str) -> dict[str, Any]:
    """compose.yaml, anchors resolved, and other files joined to it."""
    joined: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    for other in others:
        for name, service in yaml.safe_load((ROOT / other).read_text())["services"].items():
            joined["services"][name] = joined["services"][name] | service
    return joined


def check_compose(values: dict[str, Any]) -> None:
    """Refuse what the format does not know, and names of services, volumes and networks that are not there."""
    values = {name: value for name, value in values.items() if not name.startswith("x-")}
    PyCompose.from_yaml(yaml.safe_dump(values)).validate()
    for name, service in values["services"].items():
        assert set(service.get("depends_on", ())) <= set(values["services"]), name
        named = {each.split(":")[0] for each in service.get("volumes", ()) if not each.startswith("./")}
        assert named <= set(values.get("volumes", ())), name


@pytest.mark.parametrize("others", [(), ("deploy/compose.gpu.yaml",)])
def test_compose_file_is_valid(others: tuple[str, ...]) -> None:
    check_compose(compose(*others))


@pytest.mark.parametrize(
    ("service", "field", "value"),
    [
        ("redis", "comand", "redis-server"),
        ("worker", "depends_on", {"nobody": {"condition": "service_healthy"}}),
        ("worker", "depends_on", {"s3": {"condition": "service_fine"}}),
        ("s3", "volumes", ["elsewhere:/data"]),
        ("vllm", "networks", ["elsewhere"]),
        ("vllm", "healthcheck", {"interval": "often"}),
    ],
)
def test_a_wrong_field_of_the_compose_file_is_found(service: str, field: str, value: object) -> None:
    values = copy.deepcopy(compose())
    values["services"][service][field] = value
    with pytest.raises((ValueError, AssertionError)):
        check_compose(values)


def test_compose_opens_prefect_on_loopback_and_nothing_else() -> None:
    ports = {name: each["ports"] for name, each in compose()["services"].items() if "ports" in each}
    assert ports == {"prefect": ["127.0.0.1:4200:4200"]}


def test_every_variable_of_the_compose_file_is_among_the_secrets_or_the_settings_of_a_machine() -> None:
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", (ROOT / "compose.yaml").read_text()))
    secrets = settings_of(SECRETS).keys()
    assert secrets <= used
    for machine in ("laptop", "gpu"):
        known = secrets | settings_of(ROOT / "deploy" / f"{machine}.env").keys()
        assert used - known <= {"TORCHDYNAMO_DISABLE"}


def test_no_secret_has_a_value_in_the_repository() -> None:
    assert set(settings_of(SECRETS).values()) == {"", "prefect:"}


def test_files_that_compose_mounts_or_reads_are_there() -> None:
    for service in compose()["services"].values():
        mounted = [volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("./")]
        for each in [*mounted, *service.get("env_file", [])]:
            assert (ROOT / each).exists() or each in ("./models", "./data"), each


@pytest.mark.parametrize("machine", ["laptop", "gpu"])
def test_vllm_in_compose_is_started_as_the_command_starts_it(machine: str) -> None:
    settings = settings_of(ROOT / "deploy" / f"{machine}.env")
    config = load(settings["ROLLMILL_PRESET"]).serve.model_copy(update={"python": python_of(machine)})
    check_same_start(config, settings["ROLLMILL_MODEL"], settings["ROLLMILL_VLLM_ARGUMENTS"].split(), machine)


def test_vllm_in_kubernetes_is_started_as_the_command_starts_it() -> None:
    preset = settings_of(KUBERNETES / "run.env")["ROLLMILL_PRESET"]
    (container,) = manifest("StatefulSet", "vllm")["spec"]["template"]["spec"]["containers"]
    words = [word for each in container["args"] for word in each.split("=", 1)]
    model = words[words.index("--model") + 1]
    ours = [word for word in words if word not in ("--host", "0.0.0.0", "--model", model)]
    config = load(preset).serve.model_copy(update={"python": python_of("gpu")})
    check_same_start(config, model, ours, "gpu")
    assert Path(load(preset).model).name == Path(model).name


def python_of(machine: str) -> str:
    """Of an environment with the CPU build where there is one; else of one that does not exist."""
    return str(ROOT / ".venv-vllm/bin/python") if machine == "laptop" else "/nowhere/bin/python"


def check_same_start(config: Any, model: str, ours: list[str], machine: str) -> None:
    """The image's words and the manifest's ours are those of `rollmill vllm`, but for where the server listens."""
    if machine == "laptop" and not vllm.is_cpu_build(config.python):
        pytest.skip("vLLM's CPU build is not here")
    theirs = vllm.command(config, model, PORT_OF_TRAINER)[3:]
    if machine == "gpu":  # a server of its own GPU takes more of it
        theirs[theirs.index("--gpu-memory-utilization") + 1] = "0.85"
    for option, value in (("--host", "127.0.0.1"), ("--port", str(PORT_OF_TRAINER)), ("--model", model)):
        at = theirs.index(option)
        assert theirs[at : at + 2] == [option, value]
        del theirs[at : at + 2]
    image = entrypoint("vllm")
    words = image[image.index("--port") + 2 :]
    assert sorted([*words, *ours]) == sorted(theirs)


def test_addresses_of_the_cluster_are_those_of_its_services() -> None:
    config = load(f"quickstart+{KUBERNETES / 'cluster.yaml'}")
    replicas = manifest("StatefulSet", "vllm")["spec"]["replicas"]
    assert config.serve.urls == tuple(f"http://vllm-{n}.vllm:8000" for n in range(replicas))
    assert config.train.url == f"http://trainer:{PORT_OF_TRAINER}"
    assert (config.train.port, config.sync.host) == (PORT_OF_TRAINER, "trainer")
    assert compose()["services"]["vllm"]["networks"]["default"]["aliases"] == ["vllm-0.vllm"]
    assert config.store.root.split("/")[2] == compose()["services"]["s3"]["environment"]["S3_BUCKET"]


def dockerfile() -> dict[str, list[tuple[str, str]]]:
    """Instructions of the Dockerfile by target, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            if word == "FROM":
                stages[rest.split(" AS ")[1]] = stage = []
            stage.append((word, rest))
    return stages


def entrypoint(target: str) -> list[str]:
    (rest,) = [rest for word, rest in dockerfile()[target] if word == "ENTRYPOINT"]
    words: list[str] = json.loads(rest)
    return words


def test_dockerfile_is_as_hadolint_wants_it() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run(
        [hadolint, "--failure-threshold", "info", ROOT / "Dockerfile"], capture_output=True
    )
    assert checked.returncode == 0, checked.stdout


def test_images_are_those_that_compose_and_kubernetes_name() -> None:
    built = {
        each["build"]["target"]: each["image"] for each in compose()["services"].values() if "build" in each
    }
    assert built == {target: f"rollmill-{target}" for target in ("server", "worker", "vllm")}
    assert built.keys() <= dockerfile().keys()
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert {each["name"] for each in kustomization["images"]} == set(built.values())
    assert (
        json.loads((KUBERNETES / "pool.json").read_text())["variables"]["properties"]["image"]["default"]
        in built.values()
    )


def test_an_image_takes_a_work_pools_command_as_its_program() -> None:
    # Docker's and Kubernetes' pools give `prefect flow-run execute` as arguments of the entrypoint.
    assert entrypoint("base") == ["tini", "--"]
    for target in ("server", "worker"):
        assert not [word for word, _ in dockerfile()[target] if word == "ENTRYPOINT"]


@pytest.mark.parametrize("target", ["server", "worker", "vllm"])
def test_an_image_runs_as_a_user_whose_number_is_known(target: str) -> None:
    assert [rest for word, rest in dockerfile()[target] if word == "USER"][-1:] == ["1000"]


def test_what_the_dockerfile_copies_is_there_and_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = [rest.split()[:-1] for stage in dockerfile().values() for word, rest in stage if word == "COPY"]
    names = [name for names in copied for name in names]
    assert len(names) > 6
    for name in names:
        assert list(ROOT.glob(name)), name
        assert not any(Path(name).match(pattern) for pattern in ignored), name


def test_what_is_secret_or_large_is_not_sent_to_the_builder() -> None:
    assert {".env", ".git", "runs", "models"} <= set((ROOT / ".dockerignore").read_text().split())


def test_the_workers_extra_and_the_vllm_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runs = {
        target: " ".join(rest for word, rest in stage if word == "RUN")
        for target, stage in dockerfile().items()
    }
    assert "cluster" in re.findall(r"'\.\[(\w+)\]'", runs["worker"])
    assert "cluster" in project
    for kind in ("vllm-cpu", "vllm-cuda"):
        line = re.search(rf'^{kind} = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert line is not None
        assert project[kind] == [line[1]]
