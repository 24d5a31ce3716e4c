"""The command that starts a trainer service; nothing here imports torch."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ConfigError
from tasks.sync.config import SyncConfig
from tasks.train.config import TrainConfig
from tasks.train.protocol import ServiceConfig

TOKEN_ENV = "ROLLMILL_TRAINER_TOKEN"
_LOOPBACK = "127.0.0.1"


def write_config(
    train: TrainConfig, sync: SyncConfig, port: int, log_dir: Path, host: str = _LOOPBACK
) -> Path:
    """Write the service's configuration to LOG_DIR/trainer.json; returns that path."""
    config = ServiceConfig(
        train=train,
        sync=sync,
        host=host,
        port=port,
        log_dir=str(log_dir),
    )
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "trainer.json"
    path.write_text(config.model_dump_json(indent=2))
    return path


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that a trainer runs on, as one of them is told.

    Attributes:
        count: how many; each has train.ranks / count ranks.
        number: of this one; 0 has rank 0, which serves the control API.
        rendezvous: HOST:PORT of node 0 where they find each other; any free port of this machine when it is alone.
    """

    count: int = 1
    number: int = 0
    rendezvous: str = f"{_LOOPBACK}:0"

    def check(self, ranks: int) -> None:
        """Raises ConfigError when so many ranks cannot be started like this."""
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


def command(train: TrainConfig, config: Path, nodes: Nodes = Nodes()) -> list[str]:
    """What starts a trainer service, or one node's part of it, by its configuration."""
    return [*torchrun(train.ranks, nodes), "-m", "tasks.train.service", str(config)]


def torchrun(n_ranks: int, nodes: Nodes = Nodes()) -> list[str]:
    """Torchrun on this machine; a failed rank ends all of them, none is started again.

    Several nodes meet by torchrun's static rendezvous, where each says its number: so node 0, which flows talk to, is
    known beforehand.
    """
    counts = ("--nnodes", str(nodes.count), "--nproc-per-node", str(n_ranks // nodes.count))
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.rendezvous, "--local-addr", _LOOPBACK]
    if nodes.count > 1:
        host, _, port = nodes.rendezvous.rpartition(":")
        meeting = ["--node-rank", str(nodes.number), "--master-addr", host, "--master-port", port]
    words = [sys.executable, "-m", "torch.distributed.run", *counts, "--max-restarts", "0"]
    return [*words, *meeting]


def environment(train: TrainConfig, token: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The service's whole environment: ours, its access token, its threads, and no downloads."""
    return {
        **base,
        TOKEN_ENV: token,
        "OMP_NUM_THREADS": str(train.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
