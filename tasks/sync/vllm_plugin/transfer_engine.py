"""vLLM's end of a weight transfer: receives weights in the background, and puts them in place on request.

vLLM calls these methods between two steps of the model: `init_transfer_engine` begins a request and returns at once,
`update_weights` puts in place what has arrived, `shutdown` gives the request up and closes its links.
"""

import hashlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from rollmill.tasks.errors import SyncError, error_text
from rollmill.tasks.observe.spans import Recorder, recording, span
from rollmill.tasks.sync.adapters import add_adapters_to, read_weights
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.vllm_plugin.live_weights import ExpectedSums, LiveWeights
from rollmill.tasks.sync.vllm_plugin.private_vllm import (
    INIT_INFO,
    NOT_COMPILED,
    SET_CONFIG,
    TRANSFER_ENGINE,
    UPDATE_INFO,
    Feature,
    Repair,
    Weights,
    build_model,
    choose_repairs,
    copy_config,
    exchange_models,
    find_other_caches,
    find_packed_kernel,
    limit_threads,
    load_first,
    reload_weights,
    require,
    separate_modules,
)
from rollmill.tasks.sync.vllm_plugin.worker_reports import ReportSender, WorkerReport
from rollmill.tasks.sync.weight_messages import WeightUpdateRequest
from rollmill.tasks.sync.weight_receiver import WeightInbox

_ROWS = 4

# vLLM's classes have no types here.
_Engine: Any = TRANSFER_ENGINE.find()
_InitInfo: Any = INIT_INFO.find()
_UpdateInfo: Any = UPDATE_INFO.find()


class SecondCopy:
    """A second copy of a worker's model, into which weights are loaded while the live model serves.

    Build it in the thread that computes: this changes process settings.

    Args:
        live: the model that serves.
        config: vLLM's `VllmConfig` of the live model.
        device: device of both models.

    Attributes:
        model: the second model.

    Raises:
        SyncError: this model cannot have a second copy, or there is not the memory for one.
    """

    def __init__(self, live: nn.Module, config: Any, device: torch.device) -> None:
        require(Feature.SECOND_COPY)
        _check_kind(config)
        _check_memory(live, device)
        self._live, self._config, self._device = live, config, device
        self._own = copy_config(config)
        self.model = build_model(self._own, config.model_config.dtype, device)
        separate_modules(self.model, live)
        self._is_loaded = False

    def load(self, weights: Weights, repairs: Iterable[Repair]) -> None:
        """Load a checkpoint's tensors; may run in a thread while the live model computes.

        If it fails, the copy can no longer be used.
        """
        with SET_CONFIG.find()(self._own), torch.no_grad():
            if self._is_loaded:
                reload_weights(self.model, self._own.model_config, weights, repairs)
            else:
                load_first(self.model, self._own.model_config, weights, self._device)
                self._is_loaded = True

    def switch(self) -> None:
        """Exchange the second model with the live one; call it between two steps of the live one."""
        exchange_models(self._live, self.model, self._config, self._own)


def _check_kind(config: Any) -> None:
    found = [
        *find_other_caches(config),
        *(["LoRA"] if config.lora_config else []),
        *(["speculative decoding"] if config.speculative_config else []),
    ]
    if found:
        raise SyncError(
            f"no second copy of a model with {', '.join(found)}: set sync.mode=keep for this server"
        )


def _check_memory(live: nn.Module, device: torch.device) -> None:
    tensors = [*live.parameters(), *live.buffers()]
    # Tied weights share memory and count once. Kernels may pack as much again as the parameters.
    needed = 2 * sum({each.data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
    if device.type == "cuda":
        left, _ = torch.cuda.mem_get_info(device)
    else:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) << 10
    if needed > left:
        raise SyncError(
            f"a second copy of the model needs up to {needed >> 20} MiB, {left >> 20} are left: "
            "set sync.mode=keep, or give this server less memory for its caches"
        )


def find_differing_bytes(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Return the names of the live model's modules of which a parameter or buffer differs from the other model's."""
    return tuple(name for name, one, two in _pair_modules(live, other) if not _have_same_bytes(one, two))


def find_differing_kernels(live: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Return the names of the live model's modules whose packed kernel computes other results than the other model's.

    The live model must not compute meanwhile: a kernel serves one thread at a time.

    Raises:
        SyncError: the installed vLLM gives no access to its kernels.
    """
    if next(live.parameters()).device.type == "cpu":
        require(Feature.KERNELS)
    return tuple(name for name, one, two in _pair_modules(live, other) if not _compute_alike(one, two))


def _pair_modules(live: nn.Module, other: nn.Module) -> list[tuple[str, nn.Module, nn.Module]]:
    others = dict(other.named_modules(remove_duplicate=False))
    return [(name, module, others[name]) for name, module in live.named_modules()]


def _have_same_bytes(one: nn.Module, two: nn.Module) -> bool:
    tensors = [
        dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        for module in (one, two)
    ]
    return tensors[0].keys() == tensors[1].keys() and all(
        each.shape == tensors[1][name].shape
        and torch.equal(as_bytes(each.contiguous()), as_bytes(tensors[1][name].contiguous()))
        for name, each in tensors[0].items()
    )


def _compute_alike(one: Any, two: Any) -> bool:
    # On CPU a linear layer's packed weights cannot be read, so both kernels compute the same random rows.
    (kernel, weight, width), (other_kernel, other_weight, _) = (
        find_packed_kernel(one),
        find_packed_kernel(two),
    )
    if kernel is None or other_kernel is None or weight is None:
        return kernel is other_kernel
    rows = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    return torch.equal(kernel(rows, weight, None), other_kernel(rows, other_weight, None))


Tensors = list[tuple[str, torch.Tensor]]

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
    """Arguments to begin an update: a `WeightUpdateRequest` as JSON, and the address for the worker's report."""

    request: str = ""
    reports: str = ""


@dataclass
class UpdateInfo(_UpdateInfo):
    """Arguments to apply the weights received last; `reports` is the address for the worker's second report."""

    reports: str = ""


class RollmillWeightTransferEngine(_Engine[InitInfo, UpdateInfo]):
    """Weight transfer engine of a vLLM worker: receives all weights, or adapters alone, and loads its model from them.

    A thread receives them into one buffer.
    """

    # Layerwise reload keeps references to the tensors until the update is finished, so no part of the buffer is written
    # twice within a request.

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
        self._weights: Tensors = []
        self._copy: SecondCopy | None = None
        self._keeps_copy = False
        self._inbox = WeightInbox(self.parallel_config.rank, self.device)
        self._live_weights = LiveWeights(vllm_config.model_config)
        self._expected = ExpectedSums(0, {})

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Start a thread that receives a request's weights and reports when they are ready to be put in place."""
        if self._request is not None:
            self.shutdown()
        self._live_weights.note_start(self.model)
        request = msgspec.json.decode(init_info.request, type=WeightUpdateRequest)
        if self._copy is None and (request.mode == "verify" or self._switches(request)):
            self._copy = SecondCopy(self.model, self.vllm_config, self.device)
        self._request = request
        arguments = request, ReportSender(init_info.reports), self._inbox, self._copy
        threading.Thread(target=self._run, args=arguments, name="weights", daemon=True).start()

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
        self._request, self._weights = None, []
        if request is None:
            raise RuntimeError("no request has received weights that could be put in place")
        sender = ReportSender(update_info.reports)
        if request.mode == "verify" and second is not None:
            sender.send(WorkerReport(differing=find_differing_kernels(self.model, second.model)))
            # A server in mode keep may need the memory for its caches.
            if not self._keeps_copy:
                self._copy = None
            return
        if self._switches(request) and second is not None:
            # The exchanged model has the old weights and is loaded with the next ones.
            self._keeps_copy = True
            second.switch()
            sender.send(WorkerReport())
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
        self._request, self._weights = None, []
        self._inbox.drop()
        self._inbox = WeightInbox(self.parallel_config.rank, self.device)

    def _run(
        self,
        request: WeightUpdateRequest,
        sender: ReportSender,
        inbox: WeightInbox,
        second: SecondCopy | None,
    ) -> None:
        """Receive and load a request's weights in this thread, and send the worker's report, or that of a failure."""
        with limit_to_background():
            recorder, worker = Recorder(""), self.parallel_config.rank
            try:
                with recording(recorder, lane=f"weights/{worker}" if worker else "weights"):
                    with span("receiving") as receiving:
                        tensors = inbox.receive(request)
                    with span("loading"):
                        report = self._load(request, tensors, second)
                report = replace(report, received_s=receiving.duration_s, spans=tuple(recorder.take()))
            except Exception as error:  # noqa: BLE001 - the thread ends here, and the report says why
                report = WorkerReport(error=error_text(error))
        sender.send(report)

    def _load(
        self, request: WeightUpdateRequest, tensors: Tensors, second: SecondCopy | None
    ) -> WorkerReport:
        """Prepare received tensors, while the model computes, so that putting them in place is quick; returns the report."""
        found = dict(tensors)
        checksums = {
            name: hashlib.sha256(as_bytes(found[name]).numpy().data).hexdigest() for name in request.checksums
        }
        weights = tensors
        if request.base is not None:
            stored = read_weights(request.base.folder)
            weights = list(add_adapters_to(stored, found, request.base))
        n_bytes = request.decode_plan().total_bytes
        if request.mode == "verify" and second is not None:
            second.load(self._copy_to_device(weights), self.repairs)
            differing = find_differing_bytes(self.model, second.model)
            return WorkerReport(n_bytes, checksums=checksums, differing=differing)
        expected = self._live_weights.expect(weights)
        report = WorkerReport(n_bytes, checksums=checksums)
        if self._switches(request) and second is not None:
            second.load(weights, self.repairs)
            compared = self._compare_sums(second.model, expected)
            return replace(report, differing=compared.differing, uncompared=compared.uncompared)
        # Another request may have begun, whose weights are the ones to put in place.
        if self._request is request:
            self._expected = expected
            self._weights = self._copy_to_device(weights) if request.mode == "second_copy" else weights
        return report

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
