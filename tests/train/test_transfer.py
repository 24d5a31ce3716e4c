"""The trainer's end of a weight sync, where several servers join it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.sync.config import SyncConfig
from tasks.train.config import TrainConfig
from tasks.train.protocol import ServiceConfig
from tasks.train.transfer import Transfer


def test_servers_that_join_at_the_same_time_meet_the_same_sender(tmp_path: Path) -> None:
    sync = SyncConfig()
    config = ServiceConfig(
        train=TrainConfig(),
        bucket_bytes=1 << 10,
        sync_host=sync.host,
        sync_timeout_s=sync.timeout_s,
        host=sync.host,
        port=0,
        log_dir=str(tmp_path),
    )
    transfer = Transfer(config, is_sender=True)
    with ThreadPoolExecutor(8) as joining:
        met = list(joining.map(lambda _: tuple(transfer.rendezvous(None).items()), range(8)))
    assert len(set(met)) == 1
