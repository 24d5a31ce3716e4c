"""Check the settings of sinks before a run starts."""

from rollmill.tasks.config import NO_SECRET, check_extra
from rollmill.tasks.errors import ConfigError, mask_credentials
from rollmill.tasks.observe.config import ObserveConfig

OTLP = "opentelemetry.exporter.otlp.proto.http"


def check_sinks(config: ObserveConfig) -> None:
    """Raise ConfigError if a configured sink's library is not installed; the error says how to install it."""
    for field, value, module, extra in (
        ("observe.tensorboard", config.tensorboard, "tensorboardX", "tensorboard"),
        ("observe.mlflow_uri", config.mlflow_uri, "mlflow", "mlflow"),
        ("observe.wandb", config.wandb, "wandb", "wandb"),
    ):
        if value:
            check_extra(field, value, module, extra)
    if config.otlp_endpoint:
        check_receiver("observe.otlp_endpoint", config.otlp_endpoint)


def check_receiver(field: str, endpoint: str) -> None:
    """Raise ConfigError for an OpenTelemetry receiver: its library is missing, or its address has a secret or no http."""
    check_extra(field, endpoint, OTLP, "otel")
    if mask_credentials(endpoint) != endpoint:
        raise ConfigError(field, mask_credentials(endpoint), NO_SECRET)
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(field, endpoint, "give an address such as http://127.0.0.1:4318")
