"""compose.yaml says what compose allows, opens one port on loopback, and has all it names."""

import copy
import os
import re
import subprocess
from pathlib import Path

import pytest
from manifests import ROOT, SECRETS, check_compose, compose, manifests, workplace

from tests.documentation.page_commands import find_command
from tests.stubs.prefect_cluster import settings_of


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
    made = find_command(__file__, "mkdir").split()
    for service in compose()["services"].values():
        mounted = [volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("./")]
        for each in [*mounted, *service.get("env_file", [])]:
            assert (ROOT / each).exists() or each.removeprefix("./") in made, each


@pytest.mark.parametrize("service", ["start-model", "worker", "deploy", "trainer"])
def test_a_users_project_is_mounted_where_the_workers_image_finds_it(service: str) -> None:
    assert f"./project:{workplace()}/project:ro" in compose()["services"][service]["volumes"]


def test_a_service_that_ends_is_waited_for_by_another_or_up_wait_would_fail() -> None:
    services = compose()["services"]
    ending = {
        name for name, each in services.items() if each.get("restart") == "no" and "profiles" not in each
    }
    needs = [need for each in services.values() for need in each.get("depends_on", {}).items()]
    awaited = {name for name, how in needs if how["condition"] == "service_completed_successfully"}
    assert "deploy" in ending <= awaited


def test_secrets_are_made_and_shared_out_as_the_page_says(tmp_path: Path) -> None:
    """With a kubectl that only says what it was given."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "secrets.example").write_bytes(SECRETS.read_bytes())
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\nfor word; do case "$word" in --from-env-file=*) cat "${word#*=}" >"$6";; esac; done\n'
    )
    kubectl.chmod(0o755)
    script = [
        find_command(__file__, "umask"),
        find_command(__file__, "while read"),
        find_command(__file__, "mkdir"),
        find_command(__file__, "secret generic prefect-server"),
        find_command(__file__, "secret generic rollmill-run"),
    ]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", "\n".join(script)], cwd=tmp_path, env=environment, check=True)

    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
    assert (tmp_path / "models").is_dir()
    made = settings_of(tmp_path / ".env")
    assert made.keys() == settings_of(SECRETS).keys()
    assert len(set(made.values())) == len(made)
    assert min(map(len, made.values())) >= 48
    for secret in ("prefect-server", "rollmill-run"):
        named = re.findall(r"'name': '" + secret + r"', 'key': '(\w+)'", str(manifests()))
        assert named
        assert set(named) <= settings_of(tmp_path / secret).keys()
    assert not {"POSTGRES_PASSWORD", "REDIS_PASSWORD"} & settings_of(tmp_path / "rollmill-run").keys()
