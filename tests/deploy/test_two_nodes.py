"""A trainer on two nodes: the manifests of deploy/two-nodes and the Slurm script of docs/how-to/gpu.md, by the product's own command line."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import typer
import yaml
from manifests import KUBERNETES, ROOT, check_manifest, manifest

from rollmill.flows.cli import app
from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import load
from rollmill.tasks.serve.vllm_launch import check_guarded
from rollmill.tasks.train.service.launch import Nodes

OVERLAY = ROOT / "deploy" / "two-nodes"
SLURM = re.compile(r"^```bash\n(#!/bin/bash\n.*?)^```", re.DOTALL | re.MULTILINE)
GPUS_PER_NODE = 8


def overlay() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    return values


def patched(kind: str) -> dict[str, Any]:
    """The resource of that kind that the overlay changes, as it changes it."""
    (patch,) = [each for each in overlay()["patches"] if each["target"]["kind"] == kind]
    steps = yaml.safe_load((OVERLAY / patch["path"]).read_text())
    changed: dict[str, Any] = jsonpatch.apply_patch(manifest(kind, patch["target"]["name"]), steps)
    return changed


def options(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Name and options of a command `rollmill WORDS`, as the product parses them."""
    group = typer.main.get_command(app)
    context = group.make_context("rollmill", [*words])
    name, command, rest = group.resolve_command(context, [*words])  # type: ignore[attr-defined]
    return name, command.make_context(name, rest, parent=context).params


def test_the_overlay_changes_the_cluster_of_one_node_into_valid_resources() -> None:
    assert [(OVERLAY / each).resolve() for each in overlay()["resources"]] == [KUBERNETES]
    for kind in ("StatefulSet", "NetworkPolicy"):
        check_manifest(patched(kind))


def test_each_pod_of_the_trainer_is_the_node_of_its_ordinal() -> None:
    spec, config = patched("StatefulSet")["spec"], load(f"quickstart+{OVERLAY / 'cluster.yaml'}")
    assert spec["podManagementPolicy"] == "Parallel"
    (container,) = spec["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    for ordinal in range(spec["replicas"]):
        words = [each.replace(f"$({variable['name']})", str(ordinal)) for each in container["args"]]
        name, given = options(words[1:])
        nodes = Nodes(given["nodes"], given["node"], given["rendezvous"])
        nodes.check(config.train.ranks)
        assert (name, nodes.count, nodes.number) == ("trainer", spec["replicas"], ordinal)
        assert nodes.rendezvous.startswith(f"{config.sync.host}:")
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus * spec["replicas"] == config.train.ranks
    (rule,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_flows_and_servers_connect_to_the_pod_of_rank_0() -> None:
    changed, config = patched("StatefulSet"), load(f"quickstart+{OVERLAY / 'cluster.yaml'}")
    name, service = changed["metadata"]["name"], manifest("Service", changed["spec"]["serviceName"])
    host = f"{name}-0.{service['metadata']['name']}"
    port = service["spec"]["ports"][0]["port"]
    assert (config.train.url, config.sync.host) == (f"http://{host}:{port}", host)
    base = load(f"quickstart+{KUBERNETES / 'cluster.yaml'}")
    assert (config.serve.urls, config.store.root) == (base.serve.urls, base.store.root)


def test_pods_of_the_trainer_are_probed_only_where_they_listen_and_reach_each_other() -> None:
    (container,) = patched("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
    callers = [
        origin["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for rule in patched("NetworkPolicy")["spec"]["ingress"]
        if {"protocol": "TCP", "port": 1024, "endPort": 65535} in rule["ports"]
        for origin in rule["from"]
    ]
    assert sorted(callers) == ["trainer", "vllm"]


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not here")
def test_kustomize_builds_the_resources_that_the_patches_describe() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(OVERLAY)], capture_output=True, check=True, text=True
    ).stdout
    resources = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built)}
    for each in resources.values():
        check_manifest(each)
    containers = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in (resources["StatefulSet", "trainer"], patched("StatefulSet"))
    ]
    assert containers[0]["args"] == containers[1]["args"]
    (data,) = [
        each["data"]
        for (kind, name), each in resources.items()
        if kind == "ConfigMap" and "cluster.yaml" in each["data"]
    ]
    assert data["cluster.yaml"] == (OVERLAY / "cluster.yaml").read_text()
    assert {"prefect.yaml", "pool.json"} <= data.keys()


FAKES = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    # One command a line, its words by tabs.
    "srun": """IFS="$(printf '\\t')"; echo "$*" >>"$RECORD\"""",
    "curl": "exit 0",
}


def run_slurm_script(folder: Path) -> list[tuple[str, list[str]]]:
    """Run the page's script with a fake Slurm of two nodes; returns (node, words) of each command that it starts there."""
    (script,) = SLURM.findall((ROOT / "docs" / "how-to" / "gpu.md").read_text())
    for name, body in FAKES.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "SLURM_JOB_NODELIST": "node-[a-b]",
    }
    # Slurm would end the services with the script; here they end at once, and are recorded by then.
    subprocess.run(["bash", "-c", f"{script}wait\n"], env=environment, cwd=folder, check=True, timeout=60)
    found = []
    for line in (folder / "record").read_text().splitlines():
        words = line.split("\t")
        (node,) = [each.partition("=")[2] for each in words if each.startswith("--nodelist=")]
        found.append((node, words[words.index("rollmill") + 1 :]))
    return found


def test_the_slurm_script_starts_two_nodes_their_servers_and_a_run_that_attaches_to_them(
    tmp_path: Path,
) -> None:
    started = [(node, *options(words)) for node, words in run_slurm_script(tmp_path)]

    def settings(given: dict[str, Any]) -> RunConfig:
        return load(str(ROOT / "conf" / f"{given['preset']}.yaml"), tuple(given["overrides"]))

    (run,) = [settings(given) for _, name, given in started if name == "run"]
    trainers = {node: given for node, name, given in started if name == "trainer"}
    urls, busy = set(), []
    for number, (node, given) in enumerate(sorted(trainers.items())):
        nodes, config = Nodes(given["nodes"], given["node"], given["rendezvous"]), settings(given)
        nodes.check(config.train.ranks)
        assert (nodes.count, nodes.number) == (len(trainers), number)
        assert nodes.rendezvous.startswith("node-a:")
        assert config.train.model_copy(update={"url": run.train.url}) == run.train
        busy += [(node, gpu) for gpu in config.train.gpus]
    for node, name, given in started:
        if name == "vllm":
            config = settings(given)
            check_guarded(config.serve, {"ROLLMILL_VLLM_API_KEY": "key"}, host=given["host"])
            urls.add(f"http://{given['host']}:{given['port']}")
            assert given["host"] == node
            busy += [(node, gpu) for gpu in config.serve.gpus]
    first = trainers["node-a"]
    assert run.train.url == f"http://{first['host']}:{first['port']}"
    assert run.sync.host == first["host"] == "node-a"
    assert set(run.serve.urls) == urls
    assert sorted(busy) == [(node, str(gpu)) for node in sorted(trainers) for gpu in range(GPUS_PER_NODE)]
