"""A real vLLM server as the reference policy, compared with the frozen copy in the trainer."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rollmill.flows.run.rollout_logprobs import ReferenceDeployment
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.writable_run import OpenRun
from rollmill.tasks.store.schemas import ragged_array
from rollmill.tasks.store.segments import SEGMENT_COLUMNS
from rollmill.tasks.sync.broadcast import create_prefix
from rollmill.tasks.sync.config import SyncConfig
from rollmill.tasks.train.config import KLConfig, TrainConfig
from rollmill.tasks.train.engine.reference_policy import FrozenPolicy
from rollmill.tasks.train.samples import Samples
from tests.stubs.one_server_sync import send_to_server

pytestmark = pytest.mark.service

SYNC = SyncConfig(timeout_s=60.0)


async def test_a_deployment_returns_the_log_probabilities_of_the_frozen_copy(
    vllm_server, source_of, use_repairs, sequences, tmp_path: Path
) -> None:
    import pyarrow as pa

    masks = [np.arange(len(each)) > 1 for each in sequences]
    samples = Samples.from_tokens(sequences, masks)
    config = TrainConfig(kl=KLConfig(reference="frozen"))
    frozen = FrozenPolicy(config, str(vllm_server.model), torch.device("cpu"))
    with torch.no_grad():
        expected = frozen.forward(frozen.packer.micro_batch(samples, [0, 1, 2], [""])).logprobs.numpy()
    rollouts = pa.record_batch(
        {
            "trajectory_id": ["a", "b", "c"],
            "temperature": pa.array([1.0] * 3, pa.float32()),
            "token_ids": ragged_array(sequences, pa.large_list(pa.int32())),
            "loss_mask": ragged_array(masks, pa.large_list(pa.bool_())),
            **{name: pa.array([[]] * 3, pa.list_(pa.int32())) for name in SEGMENT_COLUMNS},
        }
    )
    config = StoreConfig(root=str(tmp_path))
    given = {"config": {}, "fixed": {}, "versions": {}, "git_commit": "", "config_of": config}
    async with VllmClient(vllm_server.url, vllm_server.config) as client:
        await use_repairs(client)
        source = source_of(vllm_server.model)
        await send_to_server(source, client, "run:9:0", SYNC, create_prefix())
        with OpenRun.open(RunFolder(tmp_path / "run"), **given) as run:
            async with run.writer:
                await ReferenceDeployment(run, [client], 8, print).ask(0, rollouts)
    rows = read(RunFolder(tmp_path / "run"), "logprobs", policy="reference", step=0).to_pylist()
    found = np.concatenate([np.array(row["logprobs"])[mask] for row, mask in zip(rows, masks, strict=True)])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert {row["model"] for row in rows} == {"policy"}, "its served name"
