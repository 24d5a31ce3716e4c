"""The head of a Ray cluster on this machine, as a process that ends with all of the cluster when the flow ends.

Run as `python -m rollmill.flows.run.executor.ray_head ADDRESS_FILE CPUS FOLDER`: it starts the cluster with its files in a folder, writes
its address to the file, and waits to be ended.
"""

import logging
import signal
import sys
from pathlib import Path
from typing import Any

import ray

# Results are some kilobytes, which Ray sends without its object store; this (78 MiB) is the least that it starts with.
OBJECT_STORE_BYTES = 78 << 20


def main() -> None:
    """Start the cluster, write its address, and wait."""
    file, cpus, folder = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    started: Any = ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=0,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.CRITICAL,
        _temp_dir=folder,
    )
    staged = file.with_suffix(".staged")
    staged.write_text(started.address_info["gcs_address"])
    staged.rename(file)
    signal.pause()


if __name__ == "__main__":
    main()
