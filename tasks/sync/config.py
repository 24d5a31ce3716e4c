"""Settings of the weight sync."""

from typing import Literal

from tasks.config import StageConfig, setting


class SyncConfig(StageConfig):
    transport: Literal["gloo"] = setting("gloo", "How weights travel from the trainer to the servers.")
    host: str = setting("127.0.0.1", "Address of the trainer that the servers can reach, for the transfer.")
    bucket_mib: int = setting(
        32, "MiB of one transfer buffer; tensors are split across buffers.", ge=1, le=4096
    )
    timeout_s: float = setting(120.0, "Seconds one transfer may take.", gt=0.0)
    parity_sequences: int = setting(
        4, "Sequences compared after each sync; 0 switches the check off.", ge=0, le=64
    )
    parity_threshold: float = setting(
        0.0,
        "Allowed difference of a token's log-probability in nats; 0: 1e-4 for float32, else calibrated.",
        ge=0.0,
    )
