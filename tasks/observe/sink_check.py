"""What must hold of the settings of sinks before anything is started."""

from importlib.util import find_spec

from tasks.errors import ConfigError
from tasks.observe.config import ObserveConfig


def check_sinks(config: ObserveConfig) -> None:
    """Refuse a sink whose library is not installed; ConfigError says how to install it."""
    for field, value, module, extra in (
        ("observe.tensorboard", config.tensorboard, "tensorboardX", "tensorboard"),
        ("observe.mlflow_uri", config.mlflow_uri, "mlflow", "mlflow"),
    ):
        if value and find_spec(module) is None:
            raise ConfigError(field, value, f"needs {module}: pip install 'rollmill[{extra}]'")
