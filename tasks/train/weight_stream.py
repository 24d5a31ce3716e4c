"""The stream of all weights as the ranks have it: which rank sends which bytes, and where in its memory they lie.

Under ZeRO-3 each rank sends its own shards; under the other stages, where all ranks have everything, they share the bytes
out evenly. What is not in memory as it is sent, merged adapters for example, is made from a whole layer, which ranks with
shards gather together.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

import torch
from transformers import PreTrainedModel

from tasks.sync.buckets import Range, TensorPlan, even_shares, lay_out
from tasks.sync.link import as_bytes
from tasks.sync.sender import Piece
from tasks.train.checkpoint_form import Layer, Origin, checkpoint_tensors, whole_shape
from tasks.train.deepspeed_library import deepspeed


class WeightStream:
    """A model's weights in the order of their layers; it keeps no tensor of the model.

    Args:
        model: whose weights they are.
        layers: that make up the stream.
        rank: this rank.
        world_size: ranks.

    Attributes:
        tensors: in the order of the stream.
        shares: [W] what each rank sends; each range is a part of one tensor.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer], rank: int, world_size: int) -> None:
        self._layers, self._rank, self._world_size = tuple(layers), rank, world_size
        self._is_partitioned = any(hasattr(each, "ds_tensor") for each in model.parameters())
        self.tensors = lay_out(
            (each.name, each.shape, str(each.dtype).removeprefix("torch."))
            for layer in layers
            for each in layer.tensors
        )
        self.shares = self._shares(model)
        self._own = _by_tensor(self.tensors, self.shares[rank])

    def pieces(self, model: PreTrainedModel) -> Iterator[Piece]:
        """This rank's share, a piece for each of its ranges; a collective where layers are gathered."""
        parameters = dict(model.named_parameters())
        for layer, tensors in self._by_layer():
            if layer.origins is not None:
                for tensor, origin in zip(tensors, layer.origins, strict=True):
                    yield from self._in_place(tensor, origin, parameters[origin.parameter])
            elif self._is_partitioned or any(each.name in self._own for each in tensors):
                whole = {name: parameters[name] for name in layer.parameters}
                with deepspeed.zero.GatheredParameters(list(whole.values())), torch.no_grad():
                    made = checkpoint_tensors(model, whole)
                    for tensor in tensors:
                        yield from self._made(tensor, made[tensor.name])

    def owners(self, names: Collection[str]) -> dict[str, int]:
        """Which rank is to have which of the named tensors whole: about as many bytes each."""
        named = [each for each in self.tensors if each.name in names]
        total, before, owners = sum(each.size_bytes for each in named), 0, dict[str, int]()
        for each in named:
            middle = before + each.size_bytes // 2
            owners[each.name] = middle * self._world_size // max(total, 1)
            before += each.size_bytes
        return owners

    def whole(self, model: PreTrainedModel, owners: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what is to be this rank's; valid until the next. A collective where layers are gathered.

        Args:
            model: whose weights they are.
            owners: rank of each tensor that is wanted, the same on every rank.
        """
        parameters = dict(model.named_parameters())
        for layer in self._layers:
            of_ranks = {owners[each.name] for each in layer.tensors if each.name in owners}
            if not (of_ranks if self._is_partitioned else self._rank in of_ranks):
                continue
            whole = {name: parameters[name] for name in layer.parameters}
            with deepspeed.zero.GatheredParameters(list(whole.values())), torch.no_grad():
                made = _tensors_of(model, layer, whole)
                own = (name for name in made if owners.get(name) == self._rank)
                yield from ((name, made[name]) for name in own)

    def _in_place(self, tensor: TensorPlan, origin: Origin, parameter: torch.nn.Parameter) -> Iterator[Piece]:
        ranges = self._own.get(tensor.name, ())
        if not ranges:
            return
        held = as_bytes(getattr(parameter, "ds_tensor", parameter).detach())
        first = self._part(parameter, self._rank)[0] if self._is_partitioned else 0
        shift = origin.start - tensor.offset - first
        for start, end in ranges:
            yield Piece(start, held[start + shift : end + shift], True)

    def _made(self, tensor: TensorPlan, data: torch.Tensor) -> Iterator[Piece]:
        for start, end in self._own.get(tensor.name, ()):
            flat = as_bytes(data.contiguous())
            yield Piece(start, flat[start - tensor.offset : end - tensor.offset], False)

    def _by_layer(self) -> Iterator[tuple[Layer, list[TensorPlan]]]:
        places = iter(self.tensors)
        for layer in self._layers:
            yield layer, list(islice(places, len(layer.tensors)))

    def _shares(self, model: PreTrainedModel) -> list[list[Range]]:
        parameters = dict(model.named_parameters())
        shares: list[list[Range]] = [[] for _ in range(self._world_size)]
        common = []
        for layer, tensors in self._by_layer():
            if not self._is_partitioned or layer.origins is None:
                common += tensors
                continue
            for tensor, origin in zip(tensors, layer.origins, strict=True):
                for rank, share in enumerate(shares):
                    first, end = self._part(parameters[origin.parameter], rank)
                    begin, stop = max(first - origin.start, 0), min(end - origin.start, tensor.size_bytes)
                    if begin < stop:
                        share.append((tensor.offset + begin, tensor.offset + stop))
        evenly = even_shares(common, self._world_size)
        return [sorted(own + even) for own, even in zip(shares, evenly, strict=True)]

    def _part(self, parameter: torch.nn.Parameter, rank: int) -> Range:
        """Bytes of a flat parameter that a rank's shard has: DeepSpeed's cut into W, without what pads the last."""
        size = torch.Size(whole_shape(parameter)).numel()
        each = -(-size // self._world_size)
        bytes_of_one = parameter.dtype.itemsize
        return min(rank * each, size) * bytes_of_one, min((rank + 1) * each, size) * bytes_of_one


def _by_tensor(tensors: Sequence[TensorPlan], ranges: Sequence[Range]) -> dict[str, list[Range]]:
    """Ranges, in the order of the stream, by the name of the tensor that each is a part of."""
    found: dict[str, list[Range]] = {}
    rest = deque(ranges)
    for tensor in tensors:
        while rest and rest[0][0] < tensor.offset + tensor.size_bytes:
            found.setdefault(tensor.name, []).append(rest.popleft())
    return found


def _tensors_of(
    model: PreTrainedModel, layer: Layer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """A layer's tensors, of its whole parameters."""
    if layer.origins is None:
        return checkpoint_tensors(model, parameters)
    made = {}
    for meta, origin in zip(layer.tensors, layer.origins, strict=True):
        size = torch.Size(meta.shape).numel() * meta.dtype.itemsize
        flat = as_bytes(parameters[origin.parameter].detach())[origin.start : origin.start + size]
        made[meta.name] = flat.view(meta.dtype).view(meta.shape)
    return made
