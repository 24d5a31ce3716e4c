"""The loop that serves the control API is watched over while it serves."""

import time

import httpx

from rollmill.tasks.observe.loop_monitor import LoopMonitor
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.train.service.control_api import ControlServer, Operations, build_control_app
from tests.stubs.trainer import StubTrainer

LONGEST_S = 60.0


def test_the_control_apis_loop_has_separate_metrics() -> None:
    monitor, port = LoopMonitor(0.0, 0.0, print, prefix="train/control_"), free_port()
    app = build_control_app(Operations(), StubTrainer(0.0, 0.0), "token", monitor)
    server = ControlServer(app, "127.0.0.1", port)
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/health", headers={"Authorization": "Bearer token"})
        deadline = time.monotonic() + LONGEST_S
        while not (metrics := monitor.report()):
            assert time.monotonic() < deadline, "its loop has no beat"
            time.sleep(0.01)
    finally:
        server.stop()
    values = {metric.name: metric.value for metric in metrics}
    assert answer.status_code == 200
    assert 0.0 <= values["train/control_lag_p50_ms"] <= values["train/control_lag_max_ms"]
    assert "train/control_stalls" not in values
