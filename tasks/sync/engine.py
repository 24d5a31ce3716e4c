"""vLLM's end of a weight transfer: takes weights in the background, and puts them in place when it is told to.

vLLM's calls, which run between two steps of the model, are used like this: `init_transfer_engine` begins an order and
returns at once; `update_weights` puts in place what has arrived; `shutdown` gives an order up and drops its links.
"""

import hashlib
import threading
import time
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

from tasks.errors import text_of
from tasks.sync.adapters import AdapterBase, stored_weights, with_adapters
from tasks.sync.background import beside_the_model
from tasks.sync.buckets import TransferPlan
from tasks.sync.link import RECEIVER, as_bytes, join_store, link_name, open_link
from tasks.sync.order import WeightOrder
from tasks.sync.receiver import arriving
from tasks.sync.repairs import needed_repairs
from tasks.sync.reports import Report, ReportLine
from tasks.sync.second_copy import SecondCopy, load_again


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A WeightOrder as JSON, and the address at which a Report is awaited."""

    order: Mapping[str, Any] = field(default_factory=dict)
    reports: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what the last order brought is put in place."""


class Inbox:
    """What outlasts an order: the buffer, allocated once, and the links, open under one prefix.

    An order that is given up leaves its inbox to the thread that may still write into it, and the next gets another.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._prefix, self._links = "", list[Any]()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, order: WeightOrder) -> list[tuple[str, torch.Tensor]]:
        """All tensors of an order, views of the buffer, once they are there."""
        plan = TransferPlan.from_json(**order.plan)
        if self._buffer.numel() < plan.total_bytes:
            self._buffer = torch.empty(plan.total_bytes, dtype=torch.uint8)
        return list(arriving(self._links_of(order, len(plan.senders)), plan, self._buffer))

    def _links_of(self, order: WeightOrder, n_senders: int) -> list[Any]:
        """[W] links, opened unless they are open under the same prefix."""
        if order.prefix != self._prefix:
            store = join_store(order.host, order.port, order.timeout_s)
            self._links = [
                open_link(
                    store, link_name(order.prefix, rank, self._worker), RECEIVER, order.host, order.timeout_s
                )
                for rank in range(n_senders)
            ]
            self._prefix = order.prefix
        return self._links


class RollmillWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Takes all weights, or adapters alone, into one buffer in a thread, and loads them from there.

    Layerwise reload keeps references to the tensors until the update is finished, so no part of the buffer
    is written twice within an order.
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
        self.vllm_config = vllm_config
        self.repairs = needed_repairs()
        self._order: WeightOrder | None = None
        self._weights = list[tuple[str, torch.Tensor]]()
        self._copy: SecondCopy | None = None
        self._inbox = Inbox(self.parallel_config.rank)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin an order in a thread, which reports when all is there, and ready to be put in place."""
        if self._order is not None:
            self.shutdown()
        order = WeightOrder.from_json(init_info.order)
        if order.mode != "keep" and self._copy is None:
            self._copy = SecondCopy(self.model, self.vllm_config, self.device)
        self._order = order
        arguments = order, ReportLine(init_info.reports), self._inbox, self._copy
        threading.Thread(target=self._carry_out, args=arguments, name="weights", daemon=True).start()

    def start_weight_update(self) -> None:
        """Nothing: the live model is opened when its weights are there."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put in place what the last order brought."""
        if self._order is None:
            raise RuntimeError("no order has brought weights that could be put in place")
        if self._order.mode == "second_copy" and self._copy is not None:
            self._copy.switch()
        else:
            weights = ((name, each.to(self.device)) for name, each in self._weights)
            load_again(self.model, self.vllm_config, weights, self.repairs)
        self._order, self._weights = None, []

    def finish_weight_update(self) -> None:
        """Nothing: the weights are in place."""

    def shutdown(self) -> None:
        """Give the order up, if one is under way, and drop the links; the live model is as it was."""
        if self._order is not None:
            self._copy = None  # the thread may be loading into it
        self._order, self._weights = None, []
        self._inbox = Inbox(self.parallel_config.rank)

    def _carry_out(
        self, order: WeightOrder, line: ReportLine, inbox: Inbox, second: SecondCopy | None
    ) -> None:
        with beside_the_model():
            try:
                report = self._taken(order, inbox, second)
            except Exception as error:  # noqa: BLE001 - the thread ends here, and the report says why
                report = Report(error=text_of(error))
        line.send(report)

    def _taken(self, order: WeightOrder, inbox: Inbox, second: SecondCopy | None) -> Report:
        started = time.perf_counter()
        tensors = inbox.take(order)
        received_s = time.perf_counter() - started
        found = dict(tensors)
        checksums = {
            name: hashlib.sha256(as_bytes(found[name]).numpy().data).hexdigest() for name in order.checksums
        }
        if order.base is None:
            weights = tensors
        else:
            base = AdapterBase(**order.base)
            weights = list(with_adapters(stored_weights(base.folder, torch.device("cpu")), found, base))
        if order.mode == "keep" or second is None:
            if self._order is order:
                self._weights = weights
        else:
            second.load(((name, each.to(self.device)) for name, each in weights), self.repairs)
        return Report(order.plan["total_bytes"], received_s, checksums)
