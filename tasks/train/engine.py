"""The policy under DeepSpeed: forward, backward, update; one instance on each rank."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from tasks.observe.spans import span
from tasks.train.config import TrainConfig
from tasks.train.deepspeed_library import deepspeed
from tasks.train.layout import Packer, choose_layout
from tasks.train.lora import add_adapters
from tasks.train.micro_batch import MicroBatch
from tasks.train.policy import Policy, load_policy, recompute_activations
from tasks.train.routing import RoutingReplay
from tasks.train.rules import check_offload
from tasks.train.samples import Samples
from tasks.train.state import OptimizerState

# Under ZeRO-3 parameters below this many elements times the hidden size stay on every rank.
_PERSISTENT_VECTORS = 10

_ZERO_3 = 3

# What DeepSpeed calls the parts that it keeps in the machine's memory.
_OFFLOADED = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "optimizer_and_weights": ("offload_optimizer", "offload_param"),
}


class Update(NamedTuple):
    """Outcome of one optimizer update.

    Attributes:
        updated: False when the gradient was not finite; weights and moments are then as before.
        grad_norm: global norm of the gradient before it was scaled down.
    """

    updated: bool
    grad_norm: float


class Forward(NamedTuple):
    """[N] values of a micro-batch's trained tokens, in nats.

    Attributes:
        logprobs: of the tokens, with a gradient.
        entropies: of the distributions that they were drawn from; with a gradient where that was asked for.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor


class Engine:
    """DeepSpeed around a Hugging Face causal language model.

    Attributes:
        model: the model itself; under ZeRO-3 its parameters are partitioned.
        device: where this rank computes.
        world_size: ranks (W).
        packer: makes its micro-batches.
    """

    def __init__(self, config: TrainConfig, model: PreTrainedModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self.world_size = dist.get_world_size()
        self._replay = RoutingReplay(model) if config.replay_routing else None
        check_offload(config, device.type)
        self.packer = Packer(config, choose_layout(model, config, device), device)
        self._policy = Policy(model, config.head_chunk_mib, is_partitioned=config.zero_stage == _ZERO_3)
        self._max_grad_norm = config.max_grad_norm
        self._waits_for_device = config.synchronize_parts and device.type == "cuda"
        self._is_plain = config.zero_stage == 0 and config.dtype == "float32"
        optimizer = torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        settings = _deepspeed_settings(config, model.config.get_text_config().hidden_size)
        self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        self._engine.eval()
        if config.gradient_checkpointing:
            recompute_activations(model)

    @classmethod
    def load(cls, config: TrainConfig, folder: str, device: torch.device) -> "Engine":
        """An engine over a Hugging Face model folder, with new adapters where those are trained."""
        model = load_policy(folder, config.dtype)
        if config.lora.rank:
            add_adapters(model, config.lora)
        return cls(config, model, device)

    def check_routing(self, samples: Samples) -> None:
        """Refuse routed experts that this model does not have; BatchRefusedError names a trajectory."""
        if self._replay and samples.routing is not None:
            self._replay.check(samples.routing, samples.trajectory_ids)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Book the time inside to a part of a step; on a GPU it ends when the device is done with it."""
        with span(name):
            yield
            if self._waits_for_device:
                torch.cuda.synchronize(self.device)

    def forward(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> Forward:
        """What the policy says of the trained tokens of a micro-batch; under ZeRO-3 a collective.

        Args:
            batch: the micro-batch.
            entropy_gradient: True for entropies with a gradient, for a loss that has them in it.
        """
        if self._replay:  # until the next forward pass: the backward pass may compute again
            self._replay.experts = batch.routing
        return Forward(*self._policy.values(self._engine, batch, entropy_gradient=entropy_gradient))

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradient, divided by the number of ranks; the last one joins those of all ranks.

        A collective: each rank calls it as often as the others.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss, scale_wrt_gas=False)

    def update(self, lr: float) -> Update:
        """Apply the gradient, or drop it when it is not finite; a collective, after the last backward."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._is_plain:
            return self._plain_update()
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = math.nan if norm is None else float(norm)
        return Update(bool(self._engine.was_step_applied()), norm)

    def _plain_update(self) -> Update:
        """Without ZeRO in single precision DeepSpeed looks neither at the norm nor for NaN."""
        norm = torch.nn.utils.get_total_norm(
            [each.grad for each in self.model.parameters() if each.grad is not None]
        )
        if not torch.isfinite(norm):
            self._engine.zero_grad()
            return Update(False, float(norm))
        if self._max_grad_norm > 0.0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self._max_grad_norm, norm)
        self._engine.step()
        return Update(True, float(norm))

    @property
    def state(self) -> OptimizerState:
        """Weights in single precision, moments and counts of updates, as this rank holds them."""
        return OptimizerState(self._engine, self.model)

    def close(self) -> None:
        """Let go of its memory."""
        self._engine.destroy()


def _deepspeed_settings(config: TrainConfig, hidden_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration; bfloat16 needs stage 1 at least, which keeps the weights in single precision."""
    is_plain = config.zero_stage == 0 and config.dtype == "float32"
    stage = config.zero_stage if config.dtype == "float32" else max(1, config.zero_stage)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if is_plain else config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            **{part: {"device": "cpu", "pin_memory": True} for part in _OFFLOADED[config.offload]},
            "overlap_comm": False,
            "stage3_param_persistence_threshold": _PERSISTENT_VECTORS * hidden_size,
        },
        "steps_per_print": None,
    }
