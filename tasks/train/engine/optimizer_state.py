"""The optimizer's state on a rank, as ranges of flat parameters, under every ZeRO stage.

| stage | weights in single precision | a rank holds |
|---|---|---|
| 0 | the parameters themselves | each whole; its part is a share of their numbers |
| 1, 2 | a line of all parameters, cut into W | the ranges of its cut |
| 3 | each parameter by itself, cut into W | one range of each |

DeepSpeed pads what it cuts; no range here contains padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from rollmill.tasks.sync.ranges import cut_evenly
from rollmill.tasks.train.engine.private_deepspeed import (
    find_fragment,
    find_shards,
    is_zero_1_or_2,
    is_zero_3,
    local_tensor,
    publish_cuts,
    set_shards,
    shard_range,
    whole_shape,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two, each of a parameter's shape."""
WEIGHT = "weight"
KINDS = (WEIGHT, *MOMENTS)


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Range of a flattened parameter that this rank's optimizer holds, and its place in the optimizer's own tensor.

    Attributes:
        name: name of the parameter in the model.
        shape: shape of the whole parameter.
        start: index of the range's first number in the flattened parameter.
        size: how many numbers the range has.
        owner: the optimizer's own single-precision tensor with these numbers.
        offset: index of the range's first number in the flattened owner.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    owner: torch.Tensor
    offset: int

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a [size] view of this range in the owner, or in a tensor of the owner's shape."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)

    def cut(self, first: int, end: int) -> "ParameterRange":
        """Return a shorter range: the numbers first .. end - 1, counted from the start of this range."""
        return replace(self, start=self.start + first, offset=self.offset + first, size=end - first)


class OptimizerState:
    """Reads and sets the weights and AdamW moments that a rank's DeepSpeed optimizer holds, as ranges of parameters.

    Args:
        engine: DeepSpeed's engine.
        model: the model that the engine trains.
    """

    def __init__(self, engine: Any, model: PreTrainedModel) -> None:
        self._wrapper = engine.optimizer
        self._optimizer = getattr(self._wrapper, "optimizer", self._wrapper)
        self._trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self._is_partitioned = is_zero_3(self._wrapper)
        self._is_cut = is_zero_1_or_2([each for _, each in self._trained])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter by name, whichever rank holds it."""
        return {name: whole_shape(each) for name, each in self._trained}

    def parts(self) -> list[ParameterRange]:
        """Return all ranges that this rank holds, in a fixed order."""
        if self._is_partitioned:
            return list(self._partitions())
        if self._is_cut:
            return list(self._cuts())
        return [
            ParameterRange(name, tuple(each.shape), 0, each.numel(), each, 0) for name, each in self._trained
        ]

    def own_parts(self, rank: int, world_size: int) -> list[ParameterRange]:
        """Ranges that this rank writes: every number of every parameter is written by exactly one rank."""
        parts = self.parts()
        if self._is_cut or self._is_partitioned:
            return parts
        # Without ZeRO every rank has everything: each writes an equal share, so that a checkpoint takes 1 / W of the time.
        shares = cut_evenly([each.size for each in parts], world_size)
        return [parts[number].cut(*cut) for number, cut in shares[rank]]

    def tensor(self, kind: str, part: ParameterRange) -> torch.Tensor:
        """Return [size] weights or one AdamW moment of a range: a view, or zeros for a moment that is not allocated.

        Args:
            kind: "weight", "exp_avg" or "exp_avg_sq".
            part: the range.
        """
        if kind == WEIGHT:
            return part.view(part.owner)
        moment = self._optimizer.state.get(part.owner, {}).get(kind)
        return part.view(part.owner).new_zeros(part.size) if moment is None else part.view(moment)

    def n_updates(self, part: ParameterRange) -> int:
        """Return the number of updates of a range, which AdamW's bias correction counts."""
        return int(self._optimizer.state.get(part.owner, {}).get("step", 0))

    def allocate_moments(self, part: ParameterRange, n_updates: int) -> None:
        """Allocate missing AdamW moments of a range as zeros, and set its number of updates.

        Ranges of one optimizer tensor share one count, the largest that was set.
        """
        state = self._optimizer.state[part.owner]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(part.owner, memory_format=torch.preserve_format)
        # Ranges of one owner share the count: the optimizer keeps one for its whole tensor.
        steps = max(n_updates, int(state.get("step", 0)))
        state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=part.owner.device)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy weights that were set in views of `tensor` into the model's own parameters; a collective."""
        if self._is_partitioned:
            with set_shards(self._wrapper):
                for part, (_, parameter) in zip(self._partitions(), self._trained, strict=True):
                    shard = local_tensor(parameter).view(-1).narrow(0, 0, part.size)
                    shard.copy_(part.view(part.owner))
        elif self._is_cut:
            publish_cuts(self._wrapper)

    @torch.no_grad()
    def decay_matrices(self, factor: float, owners: Sequence[torch.Tensor]) -> None:
        """Multiply this rank's weights of matrices by a factor, those in the given tensors of the optimizer.

        Norms and biases stay as they are: parameters of one dimension, and biases of experts, of shape [experts, outputs].
        """
        among = {id(each) for each in owners}
        for part in self.parts():
            if id(part.owner) in among and len(part.shape) > 1 and not part.name.endswith("bias"):
                part.view(part.owner).mul_(factor)

    def _cuts(self) -> Iterator[ParameterRange]:
        """Yield this rank's ranges under ZeRO 1 and 2, which cut the concatenated parameters into one part per rank."""
        # DeepSpeed keeps a rank's cut of each parameter group in one flat tensor.
        owners = [group["params"][0] for group in self._optimizer.param_groups]
        for name, parameter in self._trained:
            if held := find_fragment(parameter):
                shape, owner = tuple(parameter.shape), owners[held.group]
                yield ParameterRange(name, shape, held.start, held.size, owner, held.offset)

    def _partitions(self) -> Iterator[ParameterRange]:
        """Ranges under ZeRO-3; one may be empty, where a parameter has fewer numbers than there are ranks."""
        shards, rank = find_shards(self._wrapper), torch.distributed.get_rank()
        for name, parameter in self._trained:
            owner, offset = shards[id(parameter)]
            start, end = shard_range(parameter, rank)
            yield ParameterRange(name, whole_shape(parameter), start, end - start, owner, offset)
