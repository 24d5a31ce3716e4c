"""Settings of the weight sync."""

from typing import Literal

from rollmill.tasks.config import YEAR_S, StageConfig, setting


class SyncConfig(StageConfig):
    """Settings of the weight sync."""

    transport: Literal["auto", "tcp", "nccl", "ipc", "shm", "files"] = setting(
        "auto",
        "How weights travel. tcp: any network. nccl: between GPUs. ipc: within the one "
        "GPU that trainer and server share. shm: shared memory of one machine. files: a folder or "
        "bucket that all servers can read. auto: chosen for each server, and logged.",
    )
    send: Literal["whole", "changes"] = setting(
        "whole",
        "whole: all bytes of the weights at each version. changes: what differs from the version before, exactly, by tcp, nccl or "
        "files; for slow networks. It needs the memory of the weights once more on the trainer's hosts, and on the servers' with nccl.",
    )
    mode: Literal["keep", "second_copy"] = setting(
        "keep",
        "keep: requests are paused while weights are replaced. second_copy: weights are loaded into a second copy while "
        "requests run, and requests are paused only for the swap; this needs the memory of a second copy.",
    )
    host: str = setting("127.0.0.1", "Address of the trainer's machine that the servers can reach.")
    folder: str = setting(
        "",
        "Folder or s3:// address, readable by all servers, for weights that travel by files; empty: the run's folder.",
    )
    timeout_s: float = setting(120.0, "Time limit of the sync of one server, in seconds.", gt=0.0, le=YEAR_S)
    stall_timeout_s: float = setting(
        20.0,
        "Time without any byte after which a server is removed from the pool, in seconds.",
        ge=0.1,
        le=YEAR_S,
    )
    parity_sequences: int = setting(
        4,
        "Number of sequences whose log-probabilities are compared between trainer and server after each sync; 0: none.",
        ge=0,
        le=64,
    )
    verify_every: int = setting(
        0,
        "Versions between two complete verifications: all weights of a server are compared with the trainer's, and its live "
        "model with a second copy, as by `rollmill verify-sync`; 0: none.",
        ge=0,
    )
