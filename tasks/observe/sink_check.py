"""What must hold of the settings of sinks before anything is started."""

from importlib.util import find_spec

from tasks.config import NO_SECRET
from tasks.errors import ConfigError, masked
from tasks.observe.config import ObserveConfig

OTLP = "opentelemetry.exporter.otlp.proto.http"


def check_sinks(config: ObserveConfig) -> None:
    """Refuse a sink whose library is not installed; ConfigError says how to install it."""
    for field, value, module, extra in (
        ("observe.tensorboard", config.tensorboard, "tensorboardX", "tensorboard"),
        ("observe.mlflow_uri", config.mlflow_uri, "mlflow", "mlflow"),
    ):
        if value:
            check_installed(field, value, module, extra)
    if config.otlp_endpoint:
        check_receiver("observe.otlp_endpoint", config.otlp_endpoint)


def check_receiver(field: str, endpoint: str) -> None:
    """Refuse an OpenTelemetry receiver that nothing can be sent to; ConfigError says what to do."""
    check_installed(field, endpoint, OTLP, "otel")
    if masked(endpoint) != endpoint:
        raise ConfigError(field, masked(endpoint), NO_SECRET)
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(field, endpoint, "give an address such as http://127.0.0.1:4318")


def check_installed(field: str, value: object, module: str, extra: str) -> None:
    """Refuse what needs a library that is not installed; ConfigError says how to install it."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it lies in
        is_there = False
    if not is_there:
        raise ConfigError(field, value, f"needs {module}: pip install 'rollmill[{extra}]'")
