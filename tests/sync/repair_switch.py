"""Lets a test choose the repairs of a running server; vLLM mixes it into the worker (--worker-extension-cls)."""

from typing import Any

from rollmill.tasks.sync.vllm_plugin.private_vllm import CPU_REPAIRS


class RepairSwitch:
    weight_transfer_engine: Any

    def use_repairs(self, *names: str) -> None:
        self.weight_transfer_engine.repairs = tuple(each for each in CPU_REPAIRS if each.__name__ in names)

    def use_gloo_for_nccl(self) -> None:
        import gloo_as_nccl

        gloo_as_nccl.install()
