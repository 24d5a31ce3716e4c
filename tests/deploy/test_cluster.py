"""A scaled Prefect server: the settings of deploy/kubernetes, a real Postgres, a real Redis, two API servers."""

from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from prefect_redis.messaging import RedisMessagingPublisherSettings

from rollmill.flows.prefect_integration import local_server
from tests.stubs.prefect_cluster import SETTINGS, Cluster, prefect_cluster, settings_of
from tests.stubs.task_run_burst import burst_elsewhere

pytestmark = [pytest.mark.service, pytest.mark.long]
N_TASK_RUNS = 5000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with prefect_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def client(cluster: Cluster, n: int) -> httpx.Client:
    """Of API server n."""
    user, _, password = cluster.auth.partition(":")
    return httpx.Client(base_url=cluster.api_urls[n], auth=(user, password), timeout=60.0, trust_env=False)


def test_every_task_run_of_a_burst_is_recorded_and_the_other_api_server_knows_it(cluster: Cluster) -> None:
    burst = burst_elsewhere(N_TASK_RUNS, cluster.client)
    assert burst["recorded"] == N_TASK_RUNS
    of_burst = {"flow_runs": {"id": {"any_": [burst["flow_run"]]}}}
    completed = of_burst | {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    with client(cluster, 1) as other:
        assert other.post("/task_runs/count", json=of_burst).json() == N_TASK_RUNS
        assert other.post("/task_runs/count", json=completed).json() == N_TASK_RUNS


def test_a_variable_that_one_api_server_stores_is_read_by_the_other(cluster: Cluster) -> None:
    with client(cluster, 0) as one, client(cluster, 1) as other:
        variable = one.post("/variables/", json={"name": "shared", "value": 1}).json()
        assert other.get(f"/variables/{variable['id']}").json()["value"] == 1


def test_api_servers_require_the_password(cluster: Cluster) -> None:
    for url in cluster.api_urls:
        assert httpx.post(f"{url}/flows/count", json={}, trust_env=False).status_code == 401


def test_no_message_was_dropped(cluster: Cluster) -> None:
    logs = "".join(process.log.read_text() for process in cluster.processes.values() if process.log)
    assert "dead letter" not in logs
    assert "Dropping event" not in logs


def test_no_timer_publishes_events_while_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings_of(SETTINGS / "prefect-server.env").items():
        monkeypatch.setenv(name, value)
    publisher = RedisMessagingPublisherSettings()
    assert publisher.batch_size == 1
    assert publisher.publish_every > timedelta(days=300)


def test_local_server_runs_with_the_same_settings_where_both_have_one() -> None:
    scaled = settings_of(SETTINGS / "prefect-server.env")
    both = local_server.SETTINGS.keys() & scaled.keys()
    assert len(both) > 5
    assert {name: local_server.SETTINGS[name] for name in both} == {name: scaled[name] for name in both}
