"""A run's last metrics as a page that a Prometheus server reads."""

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rollmill.tasks.observe.sinks.metric_sinks import Point, RunEnd, SinkSettings


class PrometheusSink(Collector):
    """Serves the newest value of each metric at http://127.0.0.1:PORT/metrics while the run lasts.

    Example: the metric train/entropy_nats/mean is rollmill_train_entropy_nats_mean{run="quickstart"}.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self._run, self._values = settings.name, dict[str, float]()
        self._written: set[tuple[str, int]] = set()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(settings.prometheus_port, "127.0.0.1", registry)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in [*self._values.items()]:
            family = GaugeMetricFamily(name, "A metric of Rollmill.", labels=["run"])
            family.add_metric([self._run], value)
            yield family

    def has(self, marker: str, step: int) -> bool:
        return (marker, step) in self._written

    def write(self, point: Point) -> None:
        self._written.add((point.marker, point.step))
        self._values |= {_prometheus_name(name): value for name, value in point.values.items()}
        of = "policy_version" if point.marker.startswith("evaluation/") else "step"
        # A checkpoint's figures come when it is written, after those of later steps.
        newest = max(float(point.step), self._values.get(f"rollmill_{of}", 0.0))
        self._values[f"rollmill_{of}"] = newest

    def end(self, how: RunEnd) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _prometheus_name(name: str) -> str:
    return f"rollmill_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
