"""deploy/kubernetes says what Kubernetes allows, is closed to strangers, and agrees with the code."""

import json
import re
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError
from manifests import KUBERNETES, check_manifest, compose, manifest, manifests, pods, workplace
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun

from rollmill.flows.configuration.settings import load

PORT_OF_TRAINER = 8700


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
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration  # it takes seconds

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


def test_a_users_project_in_the_workers_image_is_seen_by_flow_runs_trainer_and_deployments() -> None:
    template = json.loads((KUBERNETES / "pool.json").read_text())
    (run,) = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    assert run["image"] == "{{ image }}"
    readers = [run | {"image": template["variables"]["properties"]["image"]["default"]}]
    for kind, name in (("StatefulSet", "trainer"), ("Job", "deploy")):
        readers += manifest(kind, name)["spec"]["template"]["spec"]["containers"]
    project = Path(workplace()) / "project"
    for each in readers:
        assert each["image"] == "rollmill-worker"
        hiding = [mount for mount in each["volumeMounts"] if project.is_relative_to(mount["mountPath"])]
        assert hiding == [], each["name"]


def test_addresses_of_the_cluster_are_those_of_its_services() -> None:
    config = load(f"quickstart+{KUBERNETES / 'cluster.yaml'}")
    replicas = manifest("StatefulSet", "vllm")["spec"]["replicas"]
    assert config.serve.urls == tuple(f"http://vllm-{n}.vllm:8000" for n in range(replicas))
    assert config.train.url == f"http://trainer:{PORT_OF_TRAINER}"
    assert config.sync.host == "trainer"
    (container,) = manifest("StatefulSet", "trainer")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--port", str(PORT_OF_TRAINER)]
    assert compose()["services"]["trainer"]["command"][-2:] == ["--port", str(PORT_OF_TRAINER)]
    assert compose()["services"]["vllm"]["networks"]["default"]["aliases"] == ["vllm-0.vllm"]
    assert config.store.root.split("/")[2] == compose()["services"]["s3"]["environment"]["S3_BUCKET"]
