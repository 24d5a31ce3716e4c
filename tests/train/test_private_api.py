"""What DeepSpeed, transformers, peft and torch must have that they do not promise: a newer version fails here, by name."""

import importlib
import inspect
import subprocess
import sys

import deepspeed
import pytest
import torch
import transformers
from packaging.version import Version

from rollmill.tasks.errors import LibraryError
from rollmill.tasks.train.engine import private_deepspeed, private_torch, private_transformers

ZERO = "deepspeed.runtime.zero"
SYMBOLS = [
    (f"{ZERO}.stage3", "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_prologue"),
    (f"{ZERO}.stage3", "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue"),
    (f"{ZERO}.stage_1_and_2", "DeepSpeedZeroOptimizer.update_lp_params"),
    (f"{ZERO}.parameter_offload", "FWD_MODULE_STACK"),
    (
        f"{ZERO}.partitioned_param_coordinator",
        "PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release",
    ),
    ("deepspeed.ops", "__compatible_ops__"),
    ("deepspeed.utils.mixed_precision_linkage", "link_hp_params"),
    ("transformers.core_model_loading", "revert_weight_conversion"),
    ("transformers.modeling_layers", "GradientCheckpointingLayer"),
    ("transformers", "PreTrainedModel._supports_attention_backend"),
    ("transformers", "PreTrainedModel._is_stateful"),
    ("transformers", "PreTrainedModel._load_pretrained_model"),
    ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeTopKRouter"),
    ("peft.tuners.tuners_utils", "BaseTunerLayer.enable_adapters"),
    ("torch.distributed.distributed_c10d", "Store.clone"),
    ("torch.distributed.distributed_c10d", "PrefixStore"),
    ("torch._C._distributed_c10d", "Backend.Options._timeout"),
    ("torch.multiprocessing.reductions", "reduce_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
]
ATTRIBUTES = [
    (f"{ZERO}.stage3", "self.fp32_partitioned_groups_flat ="),
    (f"{ZERO}.stage3", "self.fp16_groups ="),
    (f"{ZERO}.stage3", "self.clip_grad ="),
    (f"{ZERO}.stage_1_and_2", "self.clip_grad ="),
    (f"{ZERO}.partition_parameters", "param.ds_shape ="),
    (f"{ZERO}.partition_parameters", "param.ds_numel ="),
    (f"{ZERO}.partition_parameters", "param.ds_tensor ="),
    (f"{ZERO}.partition_parameters", "param.partition_numel ="),
    ("deepspeed.utils.mixed_precision_linkage", "lp_param._hp_mapping ="),
    ("deepspeed.utils.tensor_fragment", "lp_fragment_address"),
    ("deepspeed.utils.tensor_fragment", "hp_fragment_address"),
    ("deepspeed.utils.tensor_fragment", "param_group_index"),
]
"""Set on instances, so that a library's source alone shows them."""


@pytest.mark.slow
def test_deepspeed_is_imported_without_mlflow_which_others_can_import_later() -> None:
    code = "import sys; from rollmill.tasks.train.engine import private_deepspeed; print('mlflow' in sys.modules); import mlflow"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (shown.stdout.splitlines()[-1:], shown.returncode) == (["False"], 0), shown.stderr


@pytest.mark.parametrize(("module", "name"), SYMBOLS)
def test_a_library_has_every_registered_name(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), (
            f"{module} has no {name} any more: see tasks/train/engine/private_*.py, links/nccl_link.py, ipc_link.py"
        )
        found = getattr(found, part)


@pytest.mark.parametrize(("module", "text"), ATTRIBUTES)
def test_a_library_sets_the_attributes_that_are_read(module: str, text: str) -> None:
    assert text in inspect.getsource(importlib.import_module(module)), (
        "see tasks/train/engine/private_deepspeed.py"
    )


@pytest.mark.parametrize(
    ("library", "seen_in"),
    [
        (deepspeed.__version__, private_deepspeed.SEEN_IN),
        (transformers.__version__, private_transformers.SEEN_IN),
        (torch.__version__, private_torch.SEEN_IN),
    ],
)
def test_the_register_was_written_for_the_installed_minor_version(library: str, seen_in: str) -> None:
    assert Version(library).release[:2] == Version(seen_in).release[:2]


def test_a_missing_name_is_reported_with_the_version_that_had_it() -> None:
    with pytest.raises(
        LibraryError, match=r"deepspeed .* has no Linear\.partition_numel.*install deepspeed 0\.19\.8"
    ):
        private_deepspeed.shard_range(torch.nn.Linear(1, 1), 0)  # type: ignore[arg-type]
