"""Check the settings of sinks before a run starts."""

from importlib.util import find_spec

from rollmill.tasks.config import NO_SECRET
from rollmill.tasks.errors import ConfigError, mask_credentials
from rollmill.tasks.observe.config import ObserveConfig

OTLP = "opentelemetry.exporter.otlp.proto.http"


def check_sinks(config: ObserveConfig) -> None:
    """Raise ConfigError if a configured sink's library is not installed; the error says how to install it."""
    for field, value, module, extra in (
        ("observe.tensorboard", config.tensorboard, "tensorboardX", "tensorboard"),
        ("observe.mlflow_uri", config.mlflow_uri, "mlflow", "mlflow"),
    ):
        if value:
            check_installed(field, value, module, extra)
    if config.otlp_endpoint:
        check_receiver("observe.otlp_endpoint", config.otlp_endpoint)


def check_receiver(field: str, endpoint: str) -> None:
    """Raise ConfigError for an OpenTelemetry receiver: its library is missing, or its address has a secret or no http."""
    check_installed(field, endpoint, OTLP, "otel")
    if mask_credentials(endpoint) != endpoint:
        raise ConfigError(field, mask_credentials(endpoint), NO_SECRET)
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(field, endpoint, "give an address such as http://127.0.0.1:4318")


def check_installed(field: str, value: object, module: str, extra: str) -> None:
    """Raise ConfigError with the command that installs the extra if the library `module` is missing."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        # Not even its parent package is installed.
        is_there = False
    if not is_there:
        raise ConfigError(field, value, f"needs {module}: pip install 'rollmill[{extra}]'")
