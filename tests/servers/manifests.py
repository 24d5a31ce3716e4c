"""compose.yaml, deploy/kubernetes and the Dockerfile, read as those who start them read them."""

import copy
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SECRETS = ROOT / "deploy" / "secrets.example"
KUBERNETES_VERSION = "1.32"


@functools.cache
def parse() -> list[dict[str, Any]]:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [each for name in listed for each in yaml.safe_load_all((KUBERNETES / name).read_text())]


def manifests() -> list[dict[str, Any]]:
    """Every resource of the files that kustomization.yaml lists, to do with as one likes."""
    return copy.deepcopy(parse())


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def check_manifest(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in manifests():
        if "template" in each.get("spec", {}):
            yield each["metadata"]["name"], each["spec"]["template"]


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


def workplace() -> str:
    """The working folder of the worker's image."""
    return [rest for word, rest in dockerfile()["worker"] if word == "WORKDIR"][-1]


def entrypoint(target: str) -> list[str]:
    (rest,) = [rest for word, rest in dockerfile()[target] if word == "ENTRYPOINT"]
    words: list[str] = json.loads(rest)
    return words
