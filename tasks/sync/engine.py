"""vLLM's end of a weight transfer: receives buckets over gloo and loads the tensors as a checkpoint's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tasks.errors import SyncError
from tasks.sync.adapters import AdapterBase, stored_weights, weight_files, with_adapters
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, join_store, open_link
from tasks.sync.receiver import arriving
from tasks.sync.repairs import needed_repairs


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the sender waits, and under which prefix of its store.

    Attributes:
        base: folder of the model that adapters will be added to; empty when whole weights are sent.
    """

    host: str
    port: int
    prefix: str
    timeout_s: float
    base: str = ""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """A TransferPlan as JSON.

    Attributes:
        base: an AdapterBase as JSON when the tensors are adapters; None when they are whole weights.
    """

    tensors: Sequence[Mapping[str, Any]]
    total_bytes: int
    bucket_bytes: int
    base: Mapping[str, Any] | None = None


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives all weights, or adapters alone, into one buffer, which is allocated once, and loads views of it.

    Layerwise reload keeps references to the tensors until the update is finished, so no part of the buffer
    is written twice within an update.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if (workers := vllm_config.parallel_config.world_size) > 1:
            raise SyncError(f"the gloo transfer serves one worker a server, this one has {workers}")
        self.repairs = needed_repairs()
        self._link: Any = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the sender; a link that there was before is dropped."""
        self.shutdown()
        if init_info.base:
            weight_files(init_info.base)
        store = join_store(init_info.host, init_info.port, init_info.timeout_s)
        self._link = open_link(store, init_info.prefix, RECEIVER, init_info.host, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Open the live model for new weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive the buckets in order, and load each tensor when its last byte is there."""
        if self._link is None:
            raise SyncError("weights are announced before this server has joined a sender")
        plan = TransferPlan.from_json(update_info.tensors, update_info.total_bytes, update_info.bucket_bytes)
        if self._buffer.numel() < plan.total_bytes:
            self._buffer = torch.empty(plan.total_bytes, dtype=torch.uint8)
        arrived = ((name, each.to(self.device)) for name, each in arriving(self._link, plan, self._buffer))
        if update_info.base is None:
            self.model.load_weights(arrived)
        else:
            base = AdapterBase(**update_info.base)
            stored = stored_weights(base.folder, self.device)
            self.model.load_weights(with_adapters(stored, dict(arrived), base))

    def finish_weight_update(self) -> None:
        """Put the new weights in place, in the layouts that kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        for repair in self.repairs:
            repair(self.model)

    def shutdown(self) -> None:
        """Drop the link."""
        self._link = None
