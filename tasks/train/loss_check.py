"""Says what is wrong with the objective of a configuration: `python -m tasks.train.loss_check TRAIN_CONFIG_JSON`.

For a loss of another package, which only a process with torch can look at. Prints JSON: the ConfigError's field, value
and remedy, or null.
"""

import json
import sys

from tasks.errors import ConfigError
from tasks.train.config import TrainConfig
from tasks.train.objective import Objective


def main() -> None:
    """Make the objective, and train nothing."""
    try:
        Objective(TrainConfig.model_validate_json(sys.argv[1]))
    except ConfigError as error:
        sys.stdout.write(json.dumps([error.field, str(error.value), error.remedy]))
    else:
        sys.stdout.write("null")


if __name__ == "__main__":
    main()
