"""The policy under DeepSpeed: forward, backward, update; one instance on each rank."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rollmill.tasks.observe.spans import span
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.config import TrainConfig
from rollmill.tasks.train.engine.lora import add_adapters
from rollmill.tasks.train.engine.memory_plan import REDUCE_ELEMENTS
from rollmill.tasks.train.engine.optimizer_state import OptimizerState
from rollmill.tasks.train.engine.partitioned_loading import load_trained
from rollmill.tasks.train.engine.policy_model import PolicyModel, check_experts, recompute_activations
from rollmill.tasks.train.engine.private_deepspeed import deepspeed, forget_model, set_max_norm, whole_shape
from rollmill.tasks.train.engine.routing_replay import RoutingReplay
from rollmill.tasks.train.packing.layout import choose_layout
from rollmill.tasks.train.packing.micro_batch import MicroBatch
from rollmill.tasks.train.packing.packer import Packer
from rollmill.tasks.train.samples import Samples
from rollmill.tasks.train.setting_rules import check_offload

# Under ZeRO-3 parameters below this many elements times the hidden size stay on every rank.
_PERSISTENT_VECTORS = 10

_ZERO_2, _ZERO_3 = 2, 3

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
    """Log-probabilities and entropies of a micro-batch's N trained tokens, in nats.

    Attributes:
        logprobs: [N] log-probability of each token, with a gradient.
        entropies: [N] entropy of the policy's distribution at each token; with a gradient only if it was asked for.
        balance: [M] load-balancing loss of each row, with a gradient; None without train.router_aux_loss_coef.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    balance: torch.Tensor | None = None


# Epsilon of AdamW, as in the paper (Loshchilov & Hutter 2019, arXiv:1711.05101): single precision needs no larger one.
ADAMW_EPS = 1e-8


class Engine:
    """A Hugging Face causal language model trained by DeepSpeed.

    Attributes:
        model: the model itself; under ZeRO-3 its parameters are partitioned.
        device: where this rank computes.
        world_size: number of ranks, W.
        packer: plans and builds the model's micro-batches.
    """

    def __init__(self, config: TrainConfig, model: PreTrainedModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self.world_size = dist.get_world_size()
        self._replay = RoutingReplay(model) if config.replay_routing else None
        check_offload(config, device.type)
        self.packer = Packer(config, choose_layout(model, config, device), device)
        self._policy = PolicyModel(
            model, is_partitioned=config.zero_stage == _ZERO_3, head_dtype=config.head_dtype
        )
        self._max_grad_norm = config.max_grad_norm
        # The host runs ahead of a GPU: without waiting, a part's seconds would be booked to later parts.
        self._waits_for_device = device.type == "cuda"
        self._is_plain = config.zero_stage == 0
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(
            trained,
            lr=config.lr,
            betas=config.betas,
            eps=ADAMW_EPS,
            weight_decay=0.0,
            fused=True,
        )
        n_trained = sum(math.prod(whole_shape(each)) for each in trained)
        settings = _deepspeed_settings(config, model.config.get_text_config().hidden_size, n_trained)
        self._reduces_always = config.zero_stage >= _ZERO_2
        # Before DeepSpeed registers its hooks, which communicate: hooks run in the order of registration.
        if self.world_size > 1:
            times.watch_gradients(trained)
        self._engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        # DeepSpeed steps this optimizer for applied updates alone. Parameter groups would change how ZeRO divides parameters.
        self._decay_hook = optimizer.register_step_pre_hook(self._decay_matrices)
        self.choose_settings(config)
        # Evaluation mode: dropout would make log-probabilities differ from the servers'.
        self._engine.eval()
        if config.gradient_checkpointing:
            recompute_activations(model)

    @classmethod
    def load(cls, config: TrainConfig, folder: str, device: torch.device) -> Self:
        """Load a Hugging Face model folder into an engine, with new adapters if those are trained."""
        model = load_trained(config, folder)
        if config.lora.rank:
            add_adapters(model, config.lora)
        return cls(config, model, device)

    def check_routing(self, samples: Samples) -> None:
        """Refuse routed experts that this model does not have; BatchRefusedError names a trajectory."""
        if self._replay and samples.routing is not None:
            self._replay.check(samples.routing, samples.trajectory_ids)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the duration of the `with` block as a span `name`; on a GPU until the device has done the block's work."""
        with span(name):
            yield
            if self._waits_for_device:
                torch.cuda.synchronize(self.device)

    def forward(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> Forward:
        """Log-probabilities and entropies of a micro-batch's trained tokens; under ZeRO-3 a collective.

        Args:
            batch: the micro-batch.
            entropy_gradient: True for entropies with a gradient, for a loss that has an entropy term.
        """
        # The experts stay set until the next forward pass, since the backward pass may recompute activations.
        if self._replay:
            self._replay.experts = batch.routing
        values = self._policy.values(self._engine, batch, entropy_gradient=entropy_gradient)
        return Forward(*values, self._policy.balance)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradient, divided by the number of ranks; a collective.

        Each rank calls it as often as the others.

        Args:
            loss: scalar.
            is_last: True for the last micro-batch before the update, when the ranks' gradients are added up.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        # From ZeRO 2 on gradients are partitioned, so that every backward pass ends with a reduction.
        with times.reduction() if is_last or self._reduces_always else nullcontext():
            self._engine.backward(loss, scale_wrt_gas=False)

    def choose_settings(self, config: TrainConfig) -> None:
        """Make later updates with the settings of AdamW, the gradient's norm and the load-balancing loss of a configuration.

        Raises:
            ConfigError: the model has no experts to balance.
        """
        check_experts(self.model, config.router_aux_loss_coef)
        self._policy.balances = config.router_aux_loss_coef > 0.0
        decays_all = config.weight_decay_on == "all"
        self._matrix_decay = 0.0 if decays_all else config.weight_decay
        for group in self._engine.optimizer.param_groups:
            group["betas"], group["weight_decay"] = config.betas, config.weight_decay if decays_all else 0.0
        self._max_grad_norm = config.max_grad_norm
        if not self._is_plain:
            set_max_norm(self._engine.optimizer, config.max_grad_norm)

    def _decay_matrices(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Apply AdamW's decoupled weight decay, p *= 1 - lr * decay, to the matrices of the tensors that are stepped next."""
        if self._matrix_decay:
            for group in optimizer.param_groups:
                self.state.decay_matrices(1.0 - group["lr"] * self._matrix_decay, group["params"])

    def update(self, lr: float) -> Update:
        """Apply the accumulated gradient with learning rate `lr`, or drop it if it is not finite; a collective."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._is_plain:
            return self._plain_update()
        with times.collective():
            self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = math.nan if norm is None else float(norm)
        return Update(bool(self._engine.was_step_applied()), norm)

    def _plain_update(self) -> Update:
        """Update without ZeRO in single precision, where DeepSpeed checks neither the norm nor for NaN."""
        norm = torch.nn.utils.get_total_norm(
            [each.grad for each in self.model.parameters() if each.grad is not None]
        )
        # Dropped as ZeRO drops it: weights and moments stay as they are.
        if not torch.isfinite(norm):
            self._engine.zero_grad()
            return Update(False, float(norm))
        if self._max_grad_norm > 0.0:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self._max_grad_norm, norm)
        self._engine.step()
        return Update(True, float(norm))

    @property
    def state(self) -> OptimizerState:
        """Access to this rank's part of the single-precision weights, AdamW moments and update counts."""
        return OptimizerState(self._engine, self.model)

    def close(self) -> None:
        """Free the engine's memory, once nothing refers to it and garbage is collected."""
        self._decay_hook.remove()
        self._engine.destroy()
        forget_model(self.model)


def _deepspeed_settings(config: TrainConfig, hidden_size: int, n_trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model with `n_trained` trained parameters."""
    # By default DeepSpeed rounds the sum of the gradients to bfloat16, in a copy, to send it to other ranks: without any, too.
    is_alone = config.ranks == config.zero_stage == 1 and config.offload == "none"
    return {
        **({"communication_data_type": "fp32"} if is_alone else {}),
        "train_micro_batch_size_per_gpu": 1,
        # DeepSpeed divides by nothing but the ranks: the denominator of the loss is in `backward_scale`.
        "gradient_accumulation_steps": 1,
        # `_plain_update` clips itself: it must know the norm before DeepSpeed steps.
        "gradient_clipping": 0.0 if config.zero_stage == 0 else config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        # bfloat16 hardly overflows, but a NaN must not reach the weights.
        "bf16": {"enabled": config.dtype == "bfloat16", "check_grad_overflow": True},
        # Many micro-batches add up: in bfloat16 the later ones would be lost.
        "data_types": {"grad_accum_dtype": "fp32"},
        # torch's AdamW is used with offloading too.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.zero_stage,
            **{part: {"device": "cpu", "pin_memory": True} for part in _OFFLOADED[config.offload]},
            "overlap_comm": False,
            # A buffer has this size, however small the model is.
            "reduce_bucket_size": min(n_trained, REDUCE_ELEMENTS),
            "stage3_param_persistence_threshold": _PERSISTENT_VECTORS * hidden_size,
        },
        "steps_per_print": None,
    }


def check_model(config: TrainConfig, folder: str) -> None:
    """Refuse adapters or replayed routing that the model in a folder does not support; reads no weights.

    Raises:
        ConfigError: names the setting and what the model has.
    """
    if not (config.lora.rank or config.replay_routing):
        return
    # Without memory for weights: names and types of the layers are enough.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    if config.replay_routing:
        RoutingReplay(model)
    if config.lora.rank:
        add_adapters(model, config.lora)
