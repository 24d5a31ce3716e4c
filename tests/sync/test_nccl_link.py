"""What the NCCL link uses of torch's private API; the link itself needs two GPUs."""

from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import Backend

from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.links.nccl_link import set_timeout


def test_a_groups_time_limit_is_set_by_the_installed_torch() -> None:
    options = Backend.Options("nccl")
    set_timeout(options, timedelta(seconds=3))
    assert options._timeout == timedelta(seconds=3)


def test_a_torch_without_the_private_time_limit_is_named_with_a_remedy() -> None:
    expected = rf"torch {torch.__version__.split('+')[0]}.* has no .*_timeout, which 2.13 has: set sync.transport=tcp"
    with pytest.raises(SyncError, match=expected):
        set_timeout(object(), timedelta(seconds=3))
