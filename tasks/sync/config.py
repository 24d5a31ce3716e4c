"""Settings of the weight sync."""

from typing import Literal

from tasks.config import StageConfig, setting

Transport = Literal["tcp", "gloo", "nccl", "shm", "files"]
Mode = Literal["keep", "second_copy"]


class SyncConfig(StageConfig):
    transport: Literal["auto", "tcp", "gloo", "nccl", "shm", "files"] = setting(
        "auto",
        "How weights travel: tcp (any network), gloo (torch's, over TCP), nccl (between GPUs), shm (on one "
        "machine), files (a folder or bucket that all reach); auto chooses one for each server, and says which and why.",
    )
    mode: Mode = setting(
        "keep",
        "keep: requests are held while new weights are put in place; second_copy: they are loaded into a second copy "
        "while tokens are generated, which needs that much more memory, and requests are held for the switch alone.",
    )
    host: str = setting("127.0.0.1", "Address of the trainer that the servers can reach, for the transfer.")
    folder: str = setting(
        "",
        "Folder or s3:// address for weights that travel by files, which all servers reach; empty: the run's.",
    )
    bucket_mib: int = setting(
        32, "MiB of one transfer buffer; tensors are split across buffers.", ge=1, le=4096
    )
    streams: int = setting(
        2,
        "Links of each trainer's rank to each worker of a server; each keeps a core busy on both sides.",
        ge=1,
        le=16,
    )
    timeout_s: float = setting(120.0, "Seconds that one server's sync may take.", gt=0.0)
    stall_timeout_s: float = setting(
        20.0,
        "Seconds in which no byte goes to a server or comes from the trainer, after which it is set aside.",
        ge=0.1,
    )
    straggler_s: float = setting(
        30.0,
        "Seconds that the trainer goes on sending to slower servers after the first has everything; those left "
        "are set aside, and take the weights by files.",
        gt=0.0,
    )
    report_s: float = setting(10.0, "Seconds between two lines about a transfer that is under way.", gt=0.0)
    checksums: int = setting(
        8, "Tensors whose checksums are compared after each sync, others each time; 0: none.", ge=0
    )
    parity_sequences: int = setting(
        4, "Sequences compared after each sync; 0 switches the check off.", ge=0, le=64
    )
    parity_threshold: float = setting(
        0.0,
        "Allowed difference of a token's log-probability in nats; 0: 1e-4 for float32, else calibrated.",
        ge=0.0,
    )
    verify_every: int = setting(
        0,
        "Every so many versions all weights of a server are compared with the trainer's, and the live model with a "
        "second copy, as by `rollmill verify-sync`, before it samples; 0: never.",
        ge=0,
    )
    ratio_threshold: float = setting(
        1e-3,
        "Mean abs(ratio - 1) before a step's first update, on-policy and with float32 on both sides, above which a "
        "warning is given.",
        gt=0.0,
    )

    @property
    def bucket_bytes(self) -> int:
        """Bytes of one transfer buffer."""
        return self.bucket_mib << 20
