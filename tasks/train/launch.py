"""The command that starts a trainer service; nothing here imports torch."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tasks.sync.config import SyncConfig
from tasks.train.config import TrainConfig
from tasks.train.protocol import ServiceConfig

TOKEN_ENV = "ROLLMILL_TRAINER_TOKEN"
_BYTES_PER_MIB = 1 << 20
_LOOPBACK = "127.0.0.1"


def write_config(
    train: TrainConfig, sync: SyncConfig, port: int, log_dir: Path, host: str = _LOOPBACK
) -> Path:
    """Write the service's configuration to LOG_DIR/trainer.json; returns that path."""
    config = ServiceConfig(
        train=train,
        bucket_bytes=sync.bucket_mib * _BYTES_PER_MIB,
        sync_host=sync.host,
        sync_timeout_s=sync.timeout_s,
        host=host,
        port=port,
        log_dir=str(log_dir),
    )
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "trainer.json"
    path.write_text(config.model_dump_json(indent=2))
    return path


def command(train: TrainConfig, config: Path) -> list[str]:
    """What starts a trainer service by its configuration."""
    return [*torchrun(train.ranks), "-m", "tasks.train.service", str(config)]


def torchrun(n_ranks: int) -> list[str]:
    """Torchrun on this machine; a failed rank ends all of them, none is started again."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(n_ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_LOOPBACK}:0", "--local-addr", _LOOPBACK),
    ]


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
