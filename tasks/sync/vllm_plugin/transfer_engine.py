"""vLLM's end of a weight transfer: receives weights in the background, and puts them in place on request.

vLLM calls these methods between two steps of the model: `init_transfer_engine` begins a request and returns at once,
`update_weights` puts in place what has arrived, `shutdown` gives the request up and closes its links.
"""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from rollmill.tasks.errors import error_text
from rollmill.tasks.observe.spans import Recorder, recording, span
from rollmill.tasks.sync.adapters import add_adapters_to
from rollmill.tasks.sync.base_weights import BaseWeights, measure_place
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.links.shm_link import open_shared
from rollmill.tasks.sync.vllm_plugin.live_weights import Comparison, ExpectedSums, LiveWeights
from rollmill.tasks.sync.vllm_plugin.private_vllm import (
    INIT_INFO,
    NOT_COMPILED,
    TRANSFER_ENGINE,
    UPDATE_INFO,
    Feature,
    Weights,
    choose_repairs,
    limit_threads,
    reload_weights,
    require,
)
from rollmill.tasks.sync.vllm_plugin.second_copy import (
    SecondCopy,
    find_differing_bytes,
    find_differing_kernels,
)
from rollmill.tasks.sync.vllm_plugin.worker_reports import ReportSender, WorkerReport
from rollmill.tasks.sync.weight_messages import WeightUpdateRequest
from rollmill.tasks.sync.weight_receiver import WeightInbox, view_tensors

# vLLM's classes have no types here.
_Engine: Any = TRANSFER_ENGINE.find()
_InitInfo: Any = INIT_INFO.find()
_UpdateInfo: Any = UPDATE_INFO.find()

Tensors = list[tuple[str, torch.Tensor]]

SLICE_S = 0.03
"""Seconds of comparing between two steps of the live model, about as long as a step."""
_SWITCH_INTERVAL_S = 0.0002
# Read once: a cancelled request may end while the next one runs.
_USUAL_SWITCH_INTERVAL_S = sys.getswitchinterval()


@contextmanager
def limit_to_background() -> Iterator[None]:
    """Keep the current thread from slowing the model's thread while the block runs.

    It may run on any core, computes on one core at a time, and releases Python's interpreter lock after short intervals.
    """
    # A second team of OpenMP threads would compete for cores with the model's.
    limit_threads()
    # Whenever the model's thread returns from a kernel, it waits up to this long, 5 ms by default, for the interpreter. The
    # thread's priority stays: one that waited for a core while it holds the interpreter would block the model as long.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_SWITCH_INTERVAL_S)


@dataclass
class InitInfo(_InitInfo):
    """Arguments to begin an update.

    Attributes:
        request: a `WeightUpdateRequest` as JSON.
        reports: address for the worker's report.
        memory: path of memory into which the first worker receives for all; empty: each receives for itself.
        has_arrived: False has the first worker receive into `memory`; True has all load from it.
    """

    request: str = ""
    reports: str = ""
    memory: str = ""
    has_arrived: bool = False


@dataclass
class UpdateInfo(_UpdateInfo):
    """Arguments to load the weights received last into the live model.

    Attributes:
        reports: address of `WorkerReports`, to which the worker sends whether its live model has the weights.
        compares: compare for SLICE_S the copy that is to replace the live model, and load nothing.
    """

    reports: str = ""
    compares: bool = False


def _digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, 64 hex digits."""
    return hashlib.sha256(as_bytes(tensor).cpu().numpy().data).hexdigest()


def _find_checksums(request: WeightUpdateRequest, tensors: Tensors) -> dict[str, str]:
    """Return the checksums of received tensors that the request asks for."""
    found = dict(tensors)
    return {name: _digest(found[name]) for name in request.checksums}


def _receive(request: WeightUpdateRequest, memory: str, inbox: WeightInbox) -> tuple[Tensors, WorkerReport]:
    """Receive a request's weights, or take them from the memory where they are; returns them and a report of bytes and seconds."""
    if memory:
        plan = request.decode_plan()
        return view_tensors(plan, open_shared(memory, plan.total_bytes, is_writable=False)), WorkerReport()
    with span("receiving") as receiving:
        tensors, n_bytes = inbox.receive(request)
    return tensors, WorkerReport(n_bytes, receiving.duration_s)


class RollmillWeightTransferEngine(_Engine[InitInfo, UpdateInfo]):
    """Weight transfer engine of a vLLM worker: receives all weights, or adapters alone, and loads its model from them.

    A thread receives them into one buffer while the model computes. In mode keep on a GPU, which has no room for all weights next
    to its caches, they are loaded one by one while requests are held: from the links, or merged with adapters that were received before.
    """

    # Layerwise reload keeps references to a layer's tensors until it has all of them, so no part of the buffer is written
    # twice within a request, and streamed tensors have separate memory.

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: Any,
        vllm_config: Any,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        # The server shall not start if it could not take weights, or would compute wrong log-probabilities with them.
        require(Feature.RELOAD)
        self.vllm_config = vllm_config
        self.repairs = choose_repairs(device.type)
        self._request: WeightUpdateRequest | None = None
        self._weights: Weights = []
        self._base: BaseWeights | None = None
        self._copy: SecondCopy | None = None
        self._comparison: Comparison | None = None
        self._keeps_copy = False
        self._inbox = WeightInbox(self.parallel_config.rank, self.device)
        self._live_weights = LiveWeights(vllm_config.model_config)
        self._expected = ExpectedSums(0, torch.float32)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Start a thread that receives a request's weights and reports when they are ready to be put in place."""
        if self._request is not None:
            self.shutdown()
        self._live_weights.note_start(self.model)
        request = msgspec.json.decode(init_info.request, type=WeightUpdateRequest)
        if init_info.memory and not init_info.has_arrived:
            self._start_thread(
                init_info, partial(self._receive_for_all, request, init_info.memory, self._inbox)
            )
            return
        if self._copy is None and (request.mode == "verify" or self._switches(request)):
            self._copy = SecondCopy(self.model, self.vllm_config, self.device)
        self._request = request
        receive = partial(_receive, request, init_info.memory, self._inbox)
        self._start_thread(init_info, partial(self._prepare, request, self._inbox, receive, self._copy))

    def start_weight_update(self) -> None:
        """Do nothing: the weights were received before, and `receive_weights` loads them."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Make the live model compute with the weights of the last request; in mode verify only compare it with them.

        Sends to `update_info.reports` which layers of the model differ from the received weights. Mode verify leaves the live model
        as it is, and sends the names of its modules whose packed kernel computes other results than that of a second model
        with the received weights.

        Raises:
            RuntimeError: there is no request whose weights are not in place yet.
        """
        request, second, weights = self._request, self._copy, self._weights
        if request is None:
            raise RuntimeError("no request has received weights that could be put in place")
        sender, comparison = ReportSender(update_info.reports), self._comparison
        if update_info.compares:
            # Kernels of both models use the same scratch memory, so the copy is compared while the live model is idle.
            sender.send(WorkerReport(is_compared=comparison is None or comparison.advance(SLICE_S)))
            return
        self._request, self._weights, self._comparison = None, [], None
        if request.mode == "verify" and second is not None:
            sender.send(WorkerReport(differing=find_differing_kernels(self.model, second.model)))
            # A server in mode keep may need the memory for its caches.
            if not self._keeps_copy:
                self._copy = None
            return
        if self._switches(request) and second is not None and comparison is not None:
            comparison.advance()
            # The exchanged model has the old weights and is loaded with the next ones.
            self._keeps_copy = True
            second.switch()
            differing = comparison.differing or ()
            sender.send(WorkerReport(differing=differing, uncompared=self._live_weights.uncompared))
            return
        if self._is_streamed(request):
            sender.send(self._load_streamed(request, weights))
            return
        on_device = ((name, each.to(self.device)) for name, each in weights)
        reload_weights(self.model, self.vllm_config.model_config, on_device, self.repairs)
        sender.send(self._compare_sums(self.model, self._expected))

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has put the weights in place."""

    def shutdown(self) -> None:
        """Abandon the request in progress, if any, and close the links; the live model keeps its weights."""
        if self._request is not None:
            # The thread may be loading into it.
            self._copy = None
        self._request, self._weights, self._comparison = None, [], None
        self._inbox.drop()
        self._inbox = WeightInbox(self.parallel_config.rank, self.device)

    def _start_thread(self, init_info: InitInfo, work: Callable[[], WorkerReport]) -> None:
        """Start a thread that does a request's work and sends the worker's report."""
        arguments = ReportSender(init_info.reports), work
        threading.Thread(target=self._run, args=arguments, name="weights", daemon=True).start()

    def _run(self, sender: ReportSender, work: Callable[[], WorkerReport]) -> None:
        """Do the work in this thread, and send the report that it returns, or that of a failure."""
        with limit_to_background():
            recorder, worker = Recorder(""), self.parallel_config.rank
            try:
                with recording(recorder, lane=f"weights/{worker}" if worker else "weights"):
                    report = work()
                report = replace(report, spans=tuple(recorder.take()))
            except Exception as error:  # noqa: BLE001 - the thread ends here, and the report says why
                report = WorkerReport(error=error_text(error))
        sender.send(report)

    def _receive_for_all(self, request: WeightUpdateRequest, memory: str, inbox: WeightInbox) -> WorkerReport:
        """Receive a request's weights into the memory that all workers share, as the first worker; the others do nothing."""
        if self.parallel_config.rank:
            return WorkerReport()
        with span("receiving") as receiving:
            _, n_bytes = inbox.receive(request, memory)
        return WorkerReport(n_bytes, receiving.duration_s)

    def _prepare(
        self,
        request: WeightUpdateRequest,
        inbox: WeightInbox,
        receive: Callable[[], tuple[Tensors, WorkerReport]],
        second: SecondCopy | None,
    ) -> WorkerReport:
        """Do all that can be done for a request while the model computes; returns the report."""
        if not self._is_streamed(request):
            tensors, received = receive()
            with span("loading"):
                loaded = self._load(request, tensors, second)
            return replace(loaded, bytes=received.bytes, received_s=received.received_s)
        report = WorkerReport()
        if request.base is None:
            weights: Weights = inbox.stream(request)
        else:
            tensors, received = receive()
            report = replace(received, checksums=_find_checksums(request, tensors))
            weights = self._merge(tensors, request)
        expected = self._live_weights.begin()
        # Another request may have begun, whose weights are the ones to put in place.
        if self._request is request:
            self._expected, self._weights = expected, weights
        return report

    def _is_streamed(self, request: WeightUpdateRequest) -> bool:
        """Return True if the live model is loaded tensor by tensor as weights arrive or are merged, while requests are held."""
        is_on_device = request.arrives_on_device
        merges_on_device = request.base is not None and self.device.type == "cuda"
        return request.mode == "keep" and (is_on_device or merges_on_device)

    def _merge(self, adapters: Tensors, request: WeightUpdateRequest) -> Weights:
        """Yield all weights of the start model with adapters added, computed on the model's device."""
        base = request.base
        assert base is not None
        if self._base is None or self._base.folder != base.folder:
            # NCCL connects different GPUs, so this one is not the trainer's.
            n_workers, is_alone = self.parallel_config.world_size, request.transport == "nccl"
            place = measure_place(base.folder, self.device, n_workers, is_alone=is_alone)
            self._base = BaseWeights(base.folder, self.device, place)
        found = {name: each.to(self.device) for name, each in adapters}
        return add_adapters_to(self._base.read(), found, base)

    def _load(
        self, request: WeightUpdateRequest, tensors: Tensors, second: SecondCopy | None
    ) -> WorkerReport:
        """Prepare received tensors, while the model computes, so that putting them in place is quick; returns the report."""
        report = WorkerReport(checksums=_find_checksums(request, tensors))
        weights = tensors if request.base is None else list(self._merge(tensors, request))
        if request.mode == "verify" and second is not None:
            second.load(self._copy_to_device(weights), self.repairs)
            differing = find_differing_bytes(self.model, second.model)
            return replace(report, differing=differing)
        expected = self._live_weights.expect(weights)
        copy = second if self._switches(request) else None
        if copy is not None:
            copy.load(weights, self.repairs)
        # Another request may have begun, whose weights are the ones to put in place.
        if self._request is request:
            self._expected = expected
            if copy is None:
                self._weights = self._copy_to_device(weights) if request.mode == "second_copy" else weights
            else:
                self._comparison = self._live_weights.compare(copy.model, expected)
        return replace(report, is_compared=copy is None)

    def _load_streamed(self, request: WeightUpdateRequest, weights: Weights) -> WorkerReport:
        """Load the live model from weights that arrive, or are merged, meanwhile; returns the worker's report."""
        recorder, worker = Recorder(""), self.parallel_config.rank
        checksums: dict[str, str] = {}
        expected = self._expected

        def observe() -> Weights:
            for name, each in weights:
                expected.add(name, each)
                if request.base is None and name in request.checksums:
                    checksums[name] = _digest(each)
                yield name, each

        lane = f"weights/{worker}" if worker else "weights"
        with recording(recorder, lane=lane), span("loading") as loading:
            reload_weights(self.model, self.vllm_config.model_config, observe(), self.repairs)
        return replace(
            self._compare_sums(self.model, expected),
            bytes=request.decode_plan().total_bytes if request.base is None else 0,
            received_s=loading.duration_s if request.base is None else 0.0,
            checksums=checksums,
            spans=tuple(recorder.take()),
        )

    def _compare_sums(self, model: nn.Module, expected: ExpectedSums) -> WorkerReport:
        """Report which layers of a model differ from received weights, and which cannot be compared."""
        differing = self._live_weights.find_differing(model, expected)
        return WorkerReport(differing=differing, uncompared=self._live_weights.uncompared)

    def _switches(self, request: WeightUpdateRequest) -> bool:
        """Return True if a request is carried out by a second copy of the model that replaces the live one."""
        # Compiled code and CUDA graphs hold the addresses of the live weights. There the weights are loaded in place, from
        # the device's own memory, to which they are copied in the background.
        eager = self.vllm_config.compilation_config.mode == NOT_COMPILED.find()
        return request.mode == "second_copy" and eager and self.device.type == "cpu"

    def _copy_to_device(self, weights: Tensors) -> Tensors:
        """Return the weights in the memory of the computing device, copied concurrently with the model's work."""
        if self.device.type != "cuda":
            return weights
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            copied = [(name, each.to(self.device)) for name, each in weights]
        stream.synchronize()
        return copied
