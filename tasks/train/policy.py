"""The policy: a causal language model whose head runs on chosen positions only, and on so many at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast

from tasks.errors import ConfigError
from tasks.train.distribution import token_logprobs
from tasks.train.micro_batch import MicroBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MIB, _LOGIT_BYTES = 2**20, 4

Values = tuple[torch.Tensor, torch.Tensor]


class HeadPositions:
    """Hands the model's head the hidden states of `positions` alone.

    Over a large vocabulary the head is the dearest layer and its logits the largest tensor, and prompts need
    neither. As a hook on the head it leaves what a model does to its logits (scaling, soft caps) in place.

    Attributes:
        positions: [N] places in the flattened [B * T]; the logits are then [N, V].
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = inputs
        return hidden.flatten(0, 1).index_select(0, self.positions), *others


class Policy:
    """What a model says of a micro-batch's trained tokens, its logits in single precision never above `chunk_mib`.

    What does not fit goes through the head in chunks, each of which is computed again in the backward pass.

    Args:
        model: a causal language model, not yet partitioned.
        chunk_mib: most MiB of logits.
        is_partitioned: True when ranks will hold the head's weight in parts, and must all call it as often.
    """

    def __init__(self, model: PreTrainedModel, chunk_mib: int, *, is_partitioned: bool) -> None:
        self._model, self._head, self._is_partitioned = model, HeadPositions(model), is_partitioned
        vocabulary_size: int = model.get_output_embeddings().weight.shape[0]
        self._chunk_tokens = max(1, chunk_mib * _MIB // (_LOGIT_BYTES * vocabulary_size))

    def values(self, run: Callable[..., Any], batch: MicroBatch, *, entropy_gradient: bool) -> Values:
        """[N] log-probabilities and [N] entropies.

        Args:
            run: calls the model: the model itself, or DeepSpeed's engine around it.
            batch: the micro-batch.
            entropy_gradient: True for entropies with a gradient.
        """
        inputs: dict[str, Any] = {"input_ids": batch.token_ids, "use_cache": False}
        if batch.line is not None:
            inputs |= {"position_ids": batch.line.position_ids, "line": batch.line}
        n_chunks = self._n_chunks(batch)
        if n_chunks > 1:
            return self._in_chunks(run, inputs, batch, n_chunks, entropy_gradient)
        self._head.positions = batch.positions
        logits = run(**inputs).logits
        return token_logprobs(logits, batch.targets, batch.temperatures, entropy_gradient=entropy_gradient)

    def _n_chunks(self, batch: MicroBatch) -> int:
        n_chunks = -(-len(batch.positions) // self._chunk_tokens)
        if not (self._is_partitioned and dist.is_initialized()):
            return n_chunks
        most = torch.tensor(n_chunks, device=batch.positions.device)
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
        self._head.positions = batch.positions[:0]
        with _output_kept(_decoder_of(self._model)[1]) as kept:
            run(**inputs)
        hidden = kept[0].flatten(0, 1)
        parts = [batch.positions, batch.targets, batch.temperatures]
        found = [
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
        """The same at some positions, from the decoder's output: what the model does after it is the model's own."""
        self._head.positions = torch.arange(len(positions), device=hidden.device)
        with _decoder_knows(self._model, hidden.index_select(0, positions).unsqueeze(0)):
            logits = self._model.forward(input_ids=targets.unsqueeze(0), use_cache=False).logits
        return token_logprobs(logits, targets, temperatures, entropy_gradient=entropy_gradient)


class _Known(torch.nn.Module):
    """Stands where the decoder does, and has its output already."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._hidden)


def _decoder_of(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """Name and module of what lies below the head.

    Raises:
        ConfigError: it is not a part of the model itself.
    """
    decoder = model.get_decoder()
    for name, child in model.named_children():
        if child is decoder:
            return name, decoder
    remedy = f"the head of {type(model).__name__} cannot be run in chunks: raise it, or lower train.micro_batch_tokens"
    raise ConfigError("train.head_chunk_mib", "too small for a micro-batch", remedy)


@contextmanager
def _output_kept(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What a module gives meanwhile: its last hidden states, call by call."""
    kept: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda *call: kept.append(call[-1].last_hidden_state))
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def _decoder_knows(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[None]:
    """The decoder's output is `hidden` meanwhile, and nothing below the head is computed."""
    name, decoder = _decoder_of(model)
    setattr(model, name, _Known(hidden))
    try:
        yield
    finally:
        setattr(model, name, decoder)


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep the input of each decoder layer alone, and compute the layer again in the backward pass.

    The layer takes itself to be training, since transformers asks that; what lies in it does not, so there is no dropout.

    Raises:
        ConfigError: the model has no layers that can do so.
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
        ConfigError: there is no such model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError("model", folder, "there is no model folder (config.json and weights) at this path")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], local_files_only=True
    )
    model.eval()
    return model
