"""A causal language model whose head runs on chosen positions only, in chunks of bounded memory; log-probabilities by token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from rollmill.tasks.config import HeadDtype
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.train.collectives import times
from rollmill.tasks.train.engine.memory_plan import HEAD_CHUNK_BYTES
from rollmill.tasks.train.engine.private_deepspeed import whole_shape
from rollmill.tasks.train.engine.private_transformers import GradientCheckpointingLayer
from rollmill.tasks.train.packing.micro_batch import MicroBatch


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N] log-probabilities of the targets, with a gradient, and [N] entropies; in nats.

    Args:
        logits: [N, V]; the softmax is in at least single precision, of logits divided by the temperature.
        targets: [N] token ids.
        temperatures: [N] sampling temperature of each token.
        entropy_gradient: True for entropies with a gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(logits, targets, temperatures)  # type: ignore[no-untyped-call]  # torch gives `apply` no type
    return logprobs, entropies if entropy_gradient else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and entropies that keep one [N, V] tensor for the backward pass: p = softmax(x / T).

    With logits x, temperature T, the entropy H = -sum_k p_k log p_k, and y the target,

        d log p_y / dx_j = ((j = y) - p_j) / T
        d H / dx_j = -p_j (log p_j + H) / T
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = logits if logits.dtype == torch.float64 else logits.float()
        divisors = temperatures.to(precise.dtype).unsqueeze(1)
        log_p = torch.log_softmax(precise / divisors, dim=1)
        logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        p = log_p.exp()
        # A logit of -inf has p = 0, and 0 * -inf would be NaN.
        # In place: on a GPU the product would be one more tensor of the logits' size.
        entropies = -log_p.clamp_(min=torch.finfo(p.dtype).min).mul_(p).sum(dim=1)
        ctx.save_for_backward(p, targets, divisors, entropies)
        # An output without a gradient gets None instead of zeros, so that its [N, V] product is not computed.
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropies: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        p, targets, divisors, entropies = ctx.saved_tensors
        total: torch.Tensor | None = None
        if grad_logprobs is not None:
            upstream = grad_logprobs.unsqueeze(1) / divisors
            total = p * -upstream
            total.scatter_add_(1, targets.unsqueeze(1), upstream)
        if grad_entropies is not None:
            upstream = grad_entropies.unsqueeze(1) / divisors
            part = (torch.xlogy(p, p) + p * entropies.unsqueeze(1)) * -upstream
            total = part if total is None else total + part
        return total, None, None


class _Float32Logits(torch.autograd.Function):
    """Logits in single precision of a head in bfloat16, hidden [N, H] times weight [V, H] transposed; not rounded to bfloat16.

    Their gradient is rounded to bfloat16, as without this class, so that the backward pass needs no copy of the weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Under ZeRO-3 DeepSpeed fills the parameter again before the backward pass: it is saved as it is, not as a view of it.
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        rounded = grad.to(weight.dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad
        return rounded @ weight if needs_hidden else None, rounded.t() @ hidden if needs_weight else None


def compute_float32_logits(model: PreTrainedModel) -> None:
    """Make a bfloat16 model's head return logits in single precision, as vLLM does with head_dtype float32.

    Raises:
        ConfigError: the head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if head.weight.dtype != torch.bfloat16:
        return
    if not isinstance(head, torch.nn.Linear):
        remedy = f"the head of {type(model).__name__} is no linear layer: set it to model"
        raise ConfigError("train.head_dtype", "float32", remedy)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = _Float32Logits.apply(hidden, head.weight)  # type: ignore[no-untyped-call]  # torch gives `apply` no type
        return logits if head.bias is None else logits + head.bias.float()

    # On the instance: the layer stays what it is for adapters, DeepSpeed and exports.
    head.forward = forward  # type: ignore[method-assign, assignment]  # of one instance


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LOGIT_BYTES = 4

Values = tuple[torch.Tensor, torch.Tensor]


class HeadPositions:
    """Hook that passes the hidden states of `positions` alone to the model's head.

    Over a large vocabulary the head is the most expensive layer and its logits the largest tensor, and prompts need
    neither. Whatever a model does to its logits (scaling, soft caps) still happens.

    Attributes:
        positions: [N] indices into the flattened [B * T] tokens; the logits are then [N, V].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return hidden.flatten(0, 1).index_select(0, self.positions), *others


def check_experts(model: PreTrainedModel, coefficient: float) -> None:
    """Refuse a coefficient of the load-balancing loss for a model without routers that transformers reports.

    Raises:
        ConfigError: names train.router_aux_loss_coef.
    """
    settings = model.config.get_text_config()
    if coefficient and not (
        hasattr(settings, "output_router_logits") and getattr(settings, "num_experts_per_tok", None)
    ):
        remedy = f"transformers returns no router logits of {type(model).__name__}; set it to 0"
        raise ConfigError("train.router_aux_loss_coef", coefficient, remedy)


def balance_by_row(
    router_logits: Sequence[torch.Tensor], top_k: int, places: Sequence[np.ndarray]
) -> torch.Tensor:
    """Return the load-balancing loss of each of M rows, [M]: for E experts E * sum_e f_e P_e, which is k for even loads.

    f_e is the share of a row's tokens, of all layers, that choose expert e, and P_e the mean of its probability: Fedus et al. 2021, "Switch
    Transformers", arXiv:2101.03961, eq. 4 to 6. By row, as in DeepSeek-AI 2024, "DeepSeek-V3", arXiv:2412.19437, eq. 17 to 20, the loss does
    not depend on how rows are divided over micro-batches and ranks. Of a single row it is transformers' `aux_loss`.

    Args:
        router_logits: of each layer with experts [B * T, E], or [B, T, E].
        top_k: experts that a token chooses.
        places: [M][tokens of the row] positions of each row's tokens in the flattened [B * T].
    """
    n_experts, device = router_logits[0].shape[-1], router_logits[0].device
    tokens = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places])).to(device)
    lengths = torch.tensor([len(each) for each in places], dtype=torch.int64, device=device)
    rows = torch.arange(len(places), device=device).repeat_interleave(lengths)
    # [M, B * T] with a 1 for each token of a row: a product keeps a token that rows share once for the backward pass.
    size = (len(places), router_logits[0].numel() // n_experts)
    ones = torch.ones(len(tokens), device=device)
    members = torch.sparse_coo_tensor(
        torch.stack([rows, tokens]), ones, size, is_coalesced=True, check_invariants=False
    )
    chosen = torch.zeros(len(places), n_experts, device=device)
    probable = torch.zeros_like(chosen)
    for logits in router_logits:
        p = logits.reshape(-1, n_experts).float().softmax(-1)
        marks = torch.zeros_like(p).scatter_(1, p.topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen + torch.sparse.mm(members, marks.detach())
        probable = probable + torch.sparse.mm(members, p)
    n_choices = (lengths * len(router_logits)).unsqueeze(1)
    return n_experts * (chosen / n_choices * (probable / n_choices)).sum(1)


class PolicyModel:
    """Computes log-probabilities and entropies of a micro-batch's trained tokens with a limit on the logits in memory.

    Logits beyond the limit are computed in chunks of tokens, each of which is computed again in the backward pass.

    Args:
        model: a causal language model.
        is_partitioned: True when ranks hold the head's weight in parts (ZeRO-3), and must all run the same number of chunks.
        head_dtype: format of the logits: "float32", or "model" for that of the weights.
        chunk_bytes: largest size of the logits.

    Attributes:
        balances: True to compute the load-balancing loss of experts.
        balance: [M] that loss of each row of the last forward pass, with a gradient; None if it is not computed.
    """

    balances = False
    balance: torch.Tensor | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        is_partitioned: bool,
        head_dtype: HeadDtype = "model",
        chunk_bytes: int = HEAD_CHUNK_BYTES,
    ) -> None:
        if head_dtype == "float32":
            compute_float32_logits(model)
        self._model, self._head, self._is_partitioned = model, HeadPositions(model), is_partitioned
        vocabulary_size = whole_shape(model.get_output_embeddings().weight)[0]
        self._chunk_tokens = max(1, chunk_bytes // (_LOGIT_BYTES * vocabulary_size))

    def values(self, run: Callable[..., Any], batch: MicroBatch, *, entropy_gradient: bool) -> Values:
        """Return [N] log-probabilities and [N] entropies of the trained tokens, in nats.

        Args:
            run: what to call with the model's inputs: the model itself, or DeepSpeed's engine around it.
            batch: the micro-batch.
            entropy_gradient: True for entropies with a gradient.
        """
        inputs: dict[str, Any] = {"input_ids": batch.token_ids, "use_cache": False}
        if batch.packed is not None:
            inputs |= {"position_ids": batch.packed.position_ids, "packed": batch.packed}
        if self.balances:
            inputs["output_router_logits"] = True
        n_chunks = self._n_chunks(batch)
        if n_chunks > 1:
            return self._in_chunks(run, inputs, batch, n_chunks, entropy_gradient)
        self._head.positions = batch.positions
        output = run(**inputs)
        self._keep_balance(output, batch)
        return token_logprobs(
            output.logits, batch.targets, batch.temperatures, entropy_gradient=entropy_gradient
        )

    def _keep_balance(self, output: Any, batch: MicroBatch) -> None:
        self.balance = None
        if self.balances:
            top_k = self._model.config.get_text_config().num_experts_per_tok
            self.balance = balance_by_row(output.router_logits, top_k, batch.places)

    def _n_chunks(self, batch: MicroBatch) -> int:
        n_chunks = -(-len(batch.positions) // self._chunk_tokens)
        if not (self._is_partitioned and dist.is_initialized()):
            return n_chunks
        # Each chunk gathers the head's weight, a collective: ranks with fewer tokens run as many chunks.
        most = torch.tensor(n_chunks, device=batch.positions.device)
        with times.collective():
            dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _in_chunks(
        self,
        run: Callable[..., Any],
        inputs: dict[str, Any],
        batch: MicroBatch,
        n_chunks: int,
        entropy_gradient: bool,
    ) -> Values:
        # The decoder runs once with no positions for the head; the head then runs chunk by chunk.
        self._head.positions = batch.positions[:0]
        with _keep_output(_find_decoder(self._model)[1]) as kept:
            self._keep_balance(run(**inputs), batch)
        hidden = kept[0].flatten(0, 1)
        parts = [batch.positions, batch.targets, batch.temperatures]
        found = [
            # Computed again in the backward pass, so that one chunk of logits is in memory at a time.
            checkpoint(
                self._chunk,
                hidden,
                *chunk,
                entropy_gradient,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for chunk in zip(*(each.tensor_split(n_chunks) for each in parts), strict=True)
        ]
        logprobs, entropies = zip(*found, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _chunk(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        entropy_gradient: bool,
    ) -> Values:
        """Compute log-probabilities and entropies of one chunk of positions from the decoder's output `hidden`.

        The model's own forward pass applies the head and everything else above the decoder.
        """
        # The given hidden states are those of the chunk's positions already.
        self._head.positions = torch.arange(len(positions), device=hidden.device)
        with _replace_decoder(self._model, hidden.index_select(0, positions).unsqueeze(0)):
            logits = self._model.forward(input_ids=targets.unsqueeze(0), use_cache=False).logits
        return token_logprobs(logits, targets, temperatures, entropy_gradient=entropy_gradient)


class _KnownHidden(torch.nn.Module):
    """Takes the decoder's place in the model and returns hidden states that were computed before."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._hidden)


def _find_decoder(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """Name and module of a model's decoder, below the head.

    Raises:
        ConfigError: the decoder is not a direct child of the model, so that the head cannot run in chunks.
    """
    decoder = model.get_decoder()
    for name, child in model.named_children():
        if child is decoder:
            return name, decoder
    remedy = (
        f"the head of {type(model).__name__} cannot be run in chunks: lower it until the logits of a micro-batch fit into "
        f"{HEAD_CHUNK_BYTES >> 20} MiB"
    )
    raise ConfigError("train.micro_batch_tokens", "too large for a micro-batch", remedy)


@contextmanager
def _keep_output(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the last hidden states that a module returns in the `with` block, one list entry for each call."""
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda *call: kept.append(call[-1].last_hidden_state))
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def _replace_decoder(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[None]:
    """Make the model's decoder return `hidden` in the `with` block, without computing anything below the output head."""
    name, decoder = _find_decoder(model)
    setattr(model, name, _KnownHidden(hidden))
    try:
        yield
    finally:
        setattr(model, name, decoder)


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep the input of each decoder layer alone, and compute the layer again in the backward pass.

    transformers recomputes only layers in training mode. Their submodules stay in evaluation mode, so there is no dropout.

    Raises:
        ConfigError: the model has no layers that support it.
    """
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        remedy = f"{type(model).__name__} cannot compute its layers again; set it to false"
        raise ConfigError("train.gradient_checkpointing", True, remedy)
    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


def load_policy(folder: str, dtype: str) -> PreTrainedModel:
    """Read a Hugging Face model folder, without dropout.

    Raises:
        ConfigError: there is no such model folder.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError("model", folder, "there is no model folder (config.json and weights) at this path")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], local_files_only=True
    )
    model.eval()
    return model
