"""What peers have in a vLLM worker: parameters taken one at a time, by a call each (--worker-extension-cls)."""

from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from benchmarks.weights.gloo_pair import RECEIVER, open_pair, receive
from rollmill.tasks.sync.links.link import join_store
from rollmill.tasks.sync.vllm_plugin.private_vllm import choose_repairs


class OneByOne:
    model_runner: Any
    vllm_config: Any

    def join(self, host: str, port: int, link: str, timeout_s: float) -> None:
        self.link = open_pair(join_store(host, port, timeout_s), link, RECEIVER, host, timeout_s)

    def open_model(self) -> None:
        initialize_layerwise_reload(self.model_runner.model)

    def take_parameter(self, name: str, dtype: str, shape: list[int]) -> None:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        receive(self.link, tensor)
        self.model_runner.model.load_weights([(name, tensor)])

    def close_model(self) -> None:
        finalize_layerwise_reload(self.model_runner.model, self.vllm_config.model_config)
        for repair in choose_repairs("cpu"):
            repair(self.model_runner.model)
