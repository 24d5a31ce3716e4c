"""The weights as one stream of bytes: which rank sends which range, and where the range is in its memory.

Under ZeRO-3 each rank sends its own shards; under the other stages, where all ranks have everything, they share the bytes
out evenly. What is not in memory as it is sent, merged adapters for example, is made from a whole layer, which ranks with
shards gather together.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

import torch
from transformers import PreTrainedModel

from rollmill.tasks.sync.bucket_writer import Piece
from rollmill.tasks.sync.links.link import as_bytes
from rollmill.tasks.sync.ranges import Range, assign_evenly
from rollmill.tasks.sync.transfer_plan import TensorCut, TensorPlan, lay_out_tensors, share_evenly
from rollmill.tasks.train.checkpoints.hf_layout import (
    CheckpointLayer,
    ParameterSlice,
    checkpoint_tensors,
)
from rollmill.tasks.train.engine.private_deepspeed import deepspeed, is_sharded, local_tensor, shard_range


class WeightStream:
    """Plan of a model's weights as a stream, in the order of the layers; holds no tensor of the model.

    Args:
        model: the model.
        layers: the layers whose tensors make up the stream.
        rank: number of this rank.
        world_size: number of ranks, W.

    Attributes:
        tensors: name, shape, type and offset of each tensor, in the order of the stream.
        cuts: for each tensor how the ranks divide it.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[CheckpointLayer], rank: int, world_size: int
    ) -> None:
        self._layers, self._rank, self._world_size = tuple(layers), rank, world_size
        self._is_partitioned = any(map(is_sharded, model.parameters()))
        self.tensors = lay_out_tensors(
            (each.name, each.shape, str(each.dtype).removeprefix("torch."))
            for layer in layers
            for each in layer.tensors
        )
        self.cuts = self._cut_tensors(model)
        ranges = (
            (tensor.name, cut.find_range(tensor, rank))
            for tensor, cut in zip(self.tensors, self.cuts, strict=True)
        )
        self._own = {name: (first, end) for name, (first, end) in ranges if first < end}

    def pieces(self, model: PreTrainedModel) -> Iterator[Piece]:
        """Yield the bytes of this rank's ranges of the stream, one piece each; a collective where layers are gathered."""
        parameters = dict(model.named_parameters())
        for layer, tensors in self._by_layer():
            if layer.origins is not None:
                for tensor, origin in zip(tensors, layer.origins, strict=True):
                    yield from self._slice_pieces(tensor, origin, parameters[origin.parameter])
            # Partitioned layers are gathered by every rank, also by one that sends nothing of them.
            elif self._is_partitioned or any(each.name in self._own for each in tensors):
                whole = {name: parameters[name] for name in layer.parameters}
                with deepspeed.zero.GatheredParameters(list(whole.values())), torch.no_grad():
                    made = checkpoint_tensors(model, whole)
                    for tensor in tensors:
                        yield from self._cut_pieces(tensor, made[tensor.name])

    def owners(self, names: Collection[str]) -> dict[str, int]:
        """Assign each of the named tensors to one rank, about as many bytes to each rank; returns ranks by tensor name."""
        named = [each for each in self.tensors if each.name in names]
        ranks = assign_evenly([each.size_bytes for each in named], self._world_size)
        return {each.name: rank for each, rank in zip(named, ranks, strict=True)}

    def whole(self, model: PreTrainedModel, owners: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the tensors that this rank owns, each valid until the next one.

        A collective where layers are gathered.

        Args:
            model: the model.
            owners: rank of each wanted tensor, by name; the same on every rank.
        """
        parameters = dict(model.named_parameters())
        for layer in self._layers:
            of_ranks = {owners[each.name] for each in layer.tensors if each.name in owners}
            # Where weights are partitioned all ranks take part in every layer that one of them wants.
            if not (of_ranks if self._is_partitioned else self._rank in of_ranks):
                continue
            whole = {name: parameters[name] for name in layer.parameters}
            with deepspeed.zero.GatheredParameters(list(whole.values())), torch.no_grad():
                made = _view_tensors(model, layer, whole)
                own = (name for name in made if owners.get(name) == self._rank)
                yield from ((name, made[name]) for name in own)

    def _slice_pieces(
        self, tensor: TensorPlan, origin: ParameterSlice, parameter: torch.nn.Parameter
    ) -> Iterator[Piece]:
        if tensor.name not in self._own:
            return
        start, end = self._own[tensor.name]
        held = as_bytes(local_tensor(parameter).detach())
        first = _shard_bytes(parameter, self._rank)[0] if self._is_partitioned else 0
        shift = origin.start - tensor.offset - first
        yield Piece(start, held[start + shift : end + shift], True)

    def _cut_pieces(self, tensor: TensorPlan, data: torch.Tensor) -> Iterator[Piece]:
        if tensor.name in self._own:
            start, end = self._own[tensor.name]
            # A converted tensor may be a view in another order than it is sent in.
            flat = as_bytes(data.contiguous())
            yield Piece(start, flat[start - tensor.offset : end - tensor.offset], False)

    def _by_layer(self) -> Iterator[tuple[CheckpointLayer, list[TensorPlan]]]:
        places = iter(self.tensors)
        for layer in self._layers:
            yield layer, list(islice(places, len(layer.tensors)))

    def _cut_tensors(self, model: PreTrainedModel) -> tuple[TensorCut, ...]:
        parameters = dict(model.named_parameters())
        common: list[TensorPlan] = []
        cuts: dict[str, TensorCut] = {}
        for layer, tensors in self._by_layer():
            # What every rank has, or makes from whole layers, is shared out evenly; shards are sent by the rank that holds them.
            if not self._is_partitioned or layer.origins is None:
                common += tensors
                continue
            for tensor, origin in zip(tensors, layer.origins, strict=True):
                shard_bytes = _shard_bytes(parameters[origin.parameter], 0)[1]
                cuts[tensor.name] = TensorCut(origin.start, max(shard_bytes, 1))
        cuts |= zip((each.name for each in common), share_evenly(common, self._world_size), strict=True)
        return tuple(cuts[each.name] for each in self.tensors)


def _shard_bytes(parameter: torch.nn.Parameter, rank: int) -> Range:
    """Return (first, end) of a ZeRO-3 parameter's flattened bytes that a rank holds."""
    first, end = shard_range(parameter, rank)
    return first * parameter.dtype.itemsize, end * parameter.dtype.itemsize


def _view_tensors(
    model: PreTrainedModel, layer: CheckpointLayer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return a layer's Hugging Face checkpoint tensors by name, made from the layer's whole parameters."""
    if layer.origins is None:
        return checkpoint_tensors(model, parameters)
    made = {}
    for meta, origin in zip(layer.tensors, layer.origins, strict=True):
        size = torch.Size(meta.shape).numel() * meta.dtype.itemsize
        flat = as_bytes(parameters[origin.parameter].detach())[origin.start : origin.start + size]
        made[meta.name] = flat.view(meta.dtype).view(meta.shape)
    return made
