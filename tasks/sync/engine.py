"""vLLM's end of a weight transfer: receives buckets and loads the tensors as a checkpoint's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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

from tasks.sync.adapters import AdapterBase, stored_weights, with_adapters
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, join_store, link_name, open_link
from tasks.sync.order import WeightOrder
from tasks.sync.receiver import arriving
from tasks.sync.repairs import needed_repairs


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: links are opened by the order that names them first."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A WeightOrder as JSON."""

    order: Mapping[str, Any] = field(default_factory=dict)


class RollmillWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives all weights, or adapters alone, into one buffer, which is allocated once, and loads views of it.

    Layerwise reload keeps references to the tensors until the update is finished, so no part of the buffer
    is written twice within an update.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.repairs = needed_repairs()
        self._prefix, self._links = "", list[Any]()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing has to be prepared."""

    def start_weight_update(self) -> None:
        """Open the live model for new weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive the buckets, and load the tensors."""
        order = WeightOrder.from_json(update_info.order)
        plan = TransferPlan.from_json(**order.plan)
        if self._buffer.numel() < plan.total_bytes:
            self._buffer = torch.empty(plan.total_bytes, dtype=torch.uint8)
        links = self._links_of(order, len(plan.senders))
        arrived = ((name, each.to(self.device)) for name, each in arriving(links, plan, self._buffer))
        if order.base is None:
            self.model.load_weights(arrived)
        else:
            base = AdapterBase(**order.base)
            stored = stored_weights(base.folder, self.device)
            self.model.load_weights(with_adapters(stored, dict(arrived), base))

    def finish_weight_update(self) -> None:
        """Put the new weights in place, in the layouts that kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        for repair in self.repairs:
            repair(self.model)

    def shutdown(self) -> None:
        """Drop the links."""
        self._prefix, self._links = "", []

    def _links_of(self, order: WeightOrder, n_senders: int) -> list[Any]:
        """[W] links, opened unless they are open under the same prefix."""
        if order.prefix != self._prefix:
            store = join_store(order.host, order.port, order.timeout_s)
            worker = self.parallel_config.rank
            self._links = [
                open_link(store, link_name(order.prefix, rank, worker), RECEIVER, order.host, order.timeout_s)
                for rank in range(n_senders)
            ]
            self._prefix = order.prefix
        return self._links
