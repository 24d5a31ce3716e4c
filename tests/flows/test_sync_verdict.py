"""The verdict on servers that have the trainer's weights, and on those that have not."""

import pytest
from rich.console import Console

from rollmill.flows.policies.sync_report import SyncVerdict, verdict_table
from rollmill.flows.verify_sync import summarize
from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.weight_messages import WeightUpdateResponse

SENT = {"norm": "ab", "head": "cd"}
SAME = SyncVerdict.of("http://a", WeightUpdateResponse(2_500_000, 0.1, 0.0, SENT), SENT)
OTHER = SyncVerdict.of(
    "http://b", WeightUpdateResponse(2_500_000, 0.1, 0.0, {"norm": "ab", "head": "00"}, ("lm_head",)), SENT
)


def test_servers_that_have_every_tensor_pass() -> None:
    assert summarize([SAME], 3) == "version 3 equals the trainer's on 1 of 1 servers"


def test_a_server_that_differs_is_named_with_all_that_differs() -> None:
    with pytest.raises(SyncError) as wrong:
        summarize([SAME, OTHER], 3)
    assert str(wrong.value).endswith(
        "version 3 differs from the trainer's on servers: server http://b: head (arrived otherwise), lm_head (live)"
    )


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(width=50)
    with console.capture() as page:
        console.print(verdict_table([SAME, OTHER]))
    lines = page.get().splitlines()
    assert max(map(len, lines)) <= 50
    (row,) = [line for line in lines if "http://b" in line]
    assert [word for word in row.split() if word.isascii()] == ["http://b", "2", "2.5", "2"]
