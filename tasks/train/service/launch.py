"""The command that starts a trainer service, and the service's settings; nothing here imports torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmill.tasks.config import StageConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.processes.gpus import VISIBLE
from rollmill.tasks.processes.network_interface import find_interface
from rollmill.tasks.processes.python_child import SAFE_PATH, child_environment, python_command
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.sync.transfer_plan import BUCKET_BYTES
from rollmill.tasks.train.config import TrainConfig

TOKEN_ENV = "ROLLMILL_TRAINER_TOKEN"
"""Environment variable with the access token of a trainer."""
_LOOPBACK = "127.0.0.1"


class ServiceConfig(StageConfig):
    """Settings of one trainer service, as its command line names them in a JSON file.

    Attributes:
        train: settings of the training.
        sync: settings of the weight sync.
        host: address that the control API listens on.
        port: port of the control API.
        log_dir: folder for logs other than the service's output.
        bucket_bytes: size of one transfer buffer; a sync needs two of them, and tensors are split across them.
        heartbeat_timeout_s: seconds of silence after which a rank counts as dead.
        progress_interval_s: seconds between two reports of how far a weight transfer is.
    """

    train: TrainConfig
    sync: SyncConfig
    host: str = "127.0.0.1"
    port: int
    log_dir: str
    bucket_bytes: int = BUCKET_BYTES
    # A rank that computes sends heartbeats from a thread: a minute of silence means that it or its machine is dead.
    heartbeat_timeout_s: float = 60.0
    progress_interval_s: float = 10.0


def write_config(
    train: TrainConfig, sync: SyncConfig, port: int, log_dir: Path, host: str = _LOOPBACK, **more: float
) -> Path:
    """Write the trainer service's configuration to LOG_DIR/trainer.json, and return that path.

    Args:
        train: settings of training.
        sync: settings of the weight sync.
        port: port of the control API.
        log_dir: folder for the configuration and logs.
        host: address that the control API listens on.
        more: further fields of ServiceConfig.
    """
    config = ServiceConfig(
        train=train,
        sync=sync,
        host=host,
        port=port,
        log_dir=str(log_dir),
        **more,
    )
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "trainer.json"
    path.write_text(config.model_dump_json(indent=2))
    return path


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that a trainer runs on, and which of them this one is.

    Attributes:
        count: number of nodes; each has train.ranks / count ranks.
        number: number of this node; node 0 has rank 0, which serves the control API.
        rendezvous: HOST:PORT of node 0 at which the nodes connect to each other; by default any free port, for a single node.
    """

    count: int = 1
    number: int = 0
    rendezvous: str = f"{_LOOPBACK}:0"

    def check(self, ranks: int) -> None:
        """Raise ConfigError unless `ranks` divide evenly among the nodes, and node number and rendezvous are valid."""
        if ranks % self.count:
            raise ConfigError("train.ranks", ranks, f"give a multiple of the {self.count} nodes")
        if not 0 <= self.number < self.count:
            raise ConfigError(
                "--node", self.number, f"give a number from 0 to {self.count - 1}, another on each node"
            )
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdigit() or (self.count > 1 and not int(port)):
            remedy = "give HOST:PORT of node 0, an address that all nodes reach and a port that is free there"
            raise ConfigError("--rendezvous", self.rendezvous, remedy)

    def find_interface(self) -> str:
        """Return the name of the network interface by which this machine and node 0 reach each other.

        Raises:
            ConfigError: this machine does not resolve or reach the rendezvous, or resolves its name to loopback.
        """
        host, _, port = self.rendezvous.rpartition(":")
        try:
            name = find_interface(host, int(port))
        except OSError as error:
            remedy = (
                f"this machine finds no way to it ({error}): give an address of node 0 that all nodes reach"
            )
            raise ConfigError("--rendezvous", self.rendezvous, remedy) from None
        # Debian resolves a machine's own name to 127.0.1.1, where other machines do not reach it.
        if name == "lo" and host not in (_LOOPBACK, "localhost"):
            remedy = (
                "this machine resolves it to loopback: give node 0's network address, or correct /etc/hosts"
            )
            raise ConfigError("--rendezvous", self.rendezvous, remedy)
        return name


def build_command(train: TrainConfig, config: Path, nodes: Nodes = Nodes()) -> list[str]:
    """Return the command line that starts a trainer service, or one node's part of it, with a configuration file."""
    return [
        *launch_command(train.ranks, nodes),
        *("-m", "rollmill.tasks.processes.python_child", "rollmill.tasks.train.service.trainer_process"),
        str(config),
    ]


def launch_command(n_ranks: int, nodes: Nodes = Nodes()) -> list[str]:
    """Return the command line that starts this machine's ranks, by which a failed rank ends all ranks without a restart."""
    host, _, port = nodes.rendezvous.rpartition(":")
    here = (str(nodes.count), str(nodes.number), str(n_ranks // nodes.count), host, port)
    return python_command("rollmill.tasks.train.service.rank_launcher", *here)


def build_environment(
    train: TrainConfig, token: str, base: Mapping[str, str] = os.environ, *, gpus: str = ""
) -> dict[str, str]:
    """Return the trainer service's environment, made from `base`: access token, thread count, and downloads switched off.

    `gpus` is the value of CUDA_VISIBLE_DEVICES (`assign_gpus`); empty: that of `base`, if any.
    """
    return {
        **child_environment(base),
        # The ranks are started with `python -m`, which would put the working folder before the standard library.
        SAFE_PATH: "1",
        TOKEN_ENV: token,
        **({VISIBLE: gpus} if gpus else {}),
        "OMP_NUM_THREADS": str(train.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # The last lines of a trainer that died must be in its log.
        "PYTHONUNBUFFERED": "1",
    }
