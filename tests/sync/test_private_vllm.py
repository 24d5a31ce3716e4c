"""vLLM's private API: the installed vLLM has every name that is used, and a missing one is reported with a remedy."""

import json
import subprocess
from pathlib import Path

import pytest

from rollmill.tasks.serve.config import ServeConfig

REPOSITORY = Path(__file__).parents[2]

IN_VLLMS_ENVIRONMENT = """
import json, os
from rollmill.tasks.errors import SyncError
from rollmill.tasks.sync.vllm_plugin.private_vllm import (
    ENGINE_CONTEXT, PRIVATE_NAMES, Feature, VllmName, choose_repairs, fork_engine
)

def complaint(name):
    try:
        name.find()
    except SyncError as error:
        return str(error)

def starts_engine_by(threads):
    os.environ["OMP_NUM_THREADS"] = threads
    fork_engine()
    return ENGINE_CONTEXT.find()().get_start_method()

os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as vLLM sets it on CPU
print("ANSWER" + json.dumps({
    "missing": [error for each in PRIVATE_NAMES if (error := complaint(each))],
    "names": len(PRIVATE_NAMES),
    "features": sorted({each.feature.name for each in PRIVATE_NAMES}),
    "gone": [
        complaint(VllmName(Feature.SECOND_COPY, "vllm.gone", "Model")),
        complaint(VllmName(Feature.ARRAYS, "vllm.config", "gone")),
        complaint(VllmName(Feature.KERNELS, "vllm.config", "layer.gone", source="layer.gone =")),
    ],
    "repairs": [each.__name__ for each in choose_repairs("cpu")],
    "starts": [starts_engine_by(threads) for threads in ("2", "1")],
    "repairs_on_gpu": len(choose_repairs("cuda")),
}))
"""


@pytest.mark.service
def test_the_installed_vllm_has_every_private_name_and_a_missing_one_is_reported_with_its_remedy() -> None:
    python = Path(ServeConfig().python).absolute()
    done = subprocess.run(
        [str(python), "-c", IN_VLLMS_ENVIRONMENT],
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ANSWER" in done.stdout, done.stderr
    found = json.loads(done.stdout.partition("ANSWER")[2])
    assert found["missing"] == []
    assert found["names"] >= 30
    assert found["features"] == ["ARRAYS", "CPU_REPAIRS", "FORK", "KERNELS", "RELOAD", "SECOND_COPY"]
    module, attribute, source = found["gone"]
    assert "has no vllm.gone.Model, which 0.32.0 has: set sync.mode=keep" in module
    assert "has no vllm.config.gone, which 0.32.0 has: generations are sent as JSON" in attribute
    assert "has no vllm.config.layer.gone" in source
    assert found["repairs"] == ["repack_heads", "repack_experts"]
    assert found["repairs_on_gpu"] == 0
    assert found["starts"] == ["spawn", "fork"]
