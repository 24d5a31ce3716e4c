"""vLLM's end of a weight transfer: takes weights in the background, and puts them in place when it is told to.

vLLM's calls, which run between two steps of the model, are used like this: `init_transfer_engine` begins an order and
returns at once; `update_weights` puts in place what has arrived; `shutdown` gives an order up and drops its links.
"""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from tasks.errors import text_of
from tasks.observe.spans import Recorder, recording, span
from tasks.sync.adapters import AdapterBase, stored_weights, with_adapters
from tasks.sync.background import beside_the_model
from tasks.sync.comparison import differing_bytes, differing_kernels
from tasks.sync.inbox import Inbox
from tasks.sync.link import as_bytes
from tasks.sync.order import WeightOrder
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
    """Nothing: what the last order brought is put in place; after mode verify the address for a second Report."""

    reports: str = ""


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
        self._keeps_copy = False
        self._inbox = Inbox(self.parallel_config.rank)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Begin an order in a thread, which reports when all is there, and ready to be put in place."""
        if self._order is not None:
            self.shutdown()
        order = WeightOrder.from_json(init_info.order)
        if self._copy is None and (order.mode == "verify" or self._switches(order)):
            self._copy = SecondCopy(self.model, self.vllm_config, self.device)
        self._order = order
        arguments = order, ReportLine(init_info.reports), self._inbox, self._copy
        threading.Thread(target=self._carry_out, args=arguments, name="weights", daemon=True).start()

    def start_weight_update(self) -> None:
        """Nothing: the live model is opened when its weights are there."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put in place what the last order brought, or compare it."""
        order, second, weights = self._order, self._copy, self._weights
        self._order, self._weights = None, []
        if order is None:
            raise RuntimeError("no order has brought weights that could be put in place")
        if order.mode == "verify" and second is not None:
            ReportLine(update_info.reports).send(
                Report(differing=differing_kernels(self.model, second.model))
            )
            if not self._keeps_copy:
                self._copy = None
        elif self._switches(order) and second is not None:
            self._keeps_copy = True
            second.switch()
        else:
            on_device = ((name, each.to(self.device)) for name, each in weights)
            load_again(self.model, self.vllm_config, on_device, self.repairs)

    def finish_weight_update(self) -> None:
        """Nothing: the weights are in place."""

    def shutdown(self) -> None:
        """Give the order up, if one is under way, and drop the links; the live model is as it was."""
        if self._order is not None:
            self._copy = None  # the thread may be loading into it
        self._order, self._weights = None, []
        self._inbox.drop()
        self._inbox = Inbox(self.parallel_config.rank)

    def _carry_out(
        self, order: WeightOrder, line: ReportLine, inbox: Inbox, second: SecondCopy | None
    ) -> None:
        with beside_the_model():
            recorder, worker = Recorder(""), self.parallel_config.rank
            try:
                with recording(recorder, lane=f"weights/{worker}" if worker else "weights"):
                    report = self._taken(order, inbox, second)
                report = replace(report, spans=tuple(map(tuple, recorder.take())))
            except Exception as error:  # noqa: BLE001 - the thread ends here, and the report says why
                report = Report(error=text_of(error))
        line.send(report)

    def _taken(self, order: WeightOrder, inbox: Inbox, second: SecondCopy | None) -> Report:
        with span("receiving") as receiving:
            tensors = inbox.take(order)
        with span("loading"):
            return self._ready(order, tensors, second, receiving.duration_s)

    def _ready(
        self,
        order: WeightOrder,
        tensors: list[tuple[str, torch.Tensor]],
        second: SecondCopy | None,
        received_s: float,
    ) -> Report:
        """Make what has arrived ready to be put in place, beside requests."""
        found = dict(tensors)
        checksums = {
            name: hashlib.sha256(as_bytes(found[name]).numpy().data).hexdigest() for name in order.checksums
        }
        if order.base is None:
            weights = tensors
        else:
            base = AdapterBase(**order.base)
            weights = list(with_adapters(stored_weights(base.folder, torch.device("cpu")), found, base))
        differing: tuple[str, ...] = ()
        if order.mode == "verify" and second is not None:
            second.load(self._on_device(weights), self.repairs)
            differing = differing_bytes(self.model, second.model)
        elif self._switches(order) and second is not None:
            second.load(weights, self.repairs)
        elif self._order is order:
            self._weights = self._on_device(weights) if order.mode == "second_copy" else weights
        return Report(order.plan["total_bytes"], received_s, checksums, differing)

    def _switches(self, order: WeightOrder) -> bool:
        """True when a second copy of the model takes the live one's place.

        Elsewhere compiled code and graphs hold the addresses of the live model's weights: they are loaded in place, from
        the device's own memory, where they are brought in the background.
        """
        eager = self.vllm_config.compilation_config.mode == CompilationMode.NONE
        return order.mode == "second_copy" and eager and self.device.type == "cpu"

    def _on_device(self, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """The weights in the memory of the device that computes, brought there beside what it does."""
        if self.device.type != "cuda":
            return weights
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            there = [(name, each.to(self.device)) for name, each in weights]
        stream.synchronize()
        return there
