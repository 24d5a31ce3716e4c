"""What a rank's optimizer holds of the trained parameters, under every ZeRO stage, as ranges of flat parameters.

| stage | weights in single precision | a rank holds |
|---|---|---|
| 0 | the parameters themselves | each whole; its part is a share of their numbers |
| 1, 2 | a line of all parameters, cut into W | the ranges of its cut |
| 3 | each parameter by itself, cut into W | one range of each |

DeepSpeed pads what it cuts; padding is no part of anything here. Its tensor functions (`deepspeed.utils.safe_get_...`)
are not used: below stage 3 they add zeros of the other ranks, which makes +0 of -0.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two, each of a parameter's shape."""
WEIGHT = "weight"
KINDS = (WEIGHT, *MOMENTS)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a flat parameter, and where the optimizer has it.

    Attributes:
        name: of the parameter, as the model calls it.
        shape: of the whole parameter.
        start: the first number of the range, in the flat parameter.
        size: how many numbers.
        owner: the optimizer's own parameter with these numbers, single precision.
        offset: of the range in the flat owner.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    owner: torch.Tensor
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size] the range, in the owner or in something of its shape; a view."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.size)

    def cut(self, first: int, end: int) -> "Part":
        """The numbers first .. end - 1 of it."""
        return replace(self, start=self.start + first, offset=self.offset + first, size=end - first)


class OptimizerState:
    """A DeepSpeed engine's optimizer by trained parameters; one instance on each rank.

    Args:
        engine: DeepSpeed's.
        model: that it trains.
    """

    def __init__(self, engine: Any, model: PreTrainedModel) -> None:
        self._wrapper = engine.optimizer
        self._optimizer = getattr(self._wrapper, "optimizer", self._wrapper)
        self._trained: list[tuple[str, Any]] = [
            (name, each) for name, each in model.named_parameters() if each.requires_grad
        ]  # DeepSpeed adds attributes to them
        self._is_partitioned = hasattr(self._wrapper, "fp32_partitioned_groups_flat")
        self._is_cut = any(hasattr(each, "_hp_mapping") for _, each in self._trained)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all trained parameters, whoever holds them, by name."""
        return {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in self._trained}

    def parts(self) -> list[Part]:
        """All that this rank holds, in an order that is the same each time."""
        if self._is_partitioned:
            return list(self._partitions())
        if self._is_cut:
            return list(self._cuts())
        return [Part(name, tuple(each.shape), 0, each.numel(), each, 0) for name, each in self._trained]

    def own_parts(self, rank: int, world_size: int) -> list[Part]:
        """Those that this rank writes: every number of every parameter is one rank's alone."""
        parts = self.parts()
        return parts if self._is_cut or self._is_partitioned else share(parts, rank, world_size)

    def tensor(self, kind: str, part: Part) -> torch.Tensor:
        """[size] the weights of a part, or a moment: a view, or zeros before the first update."""
        if kind == WEIGHT:
            return part.of(part.owner)
        moment = self._optimizer.state.get(part.owner, {}).get(kind)
        return part.of(part.owner).new_zeros(part.size) if moment is None else part.of(moment)

    def n_updates(self, part: Part) -> int:
        """How often the optimizer has moved a part: what its bias correction goes by."""
        return int(self._optimizer.state.get(part.owner, {}).get("step", 0))

    def begin_moments(self, part: Part, n_updates: int) -> None:
        """Have moments to be filled, as after so many updates; of an owner of several parts the most count."""
        state = self._optimizer.state[part.owner]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(part.owner, memory_format=torch.preserve_format)
        steps = max(n_updates, int(state.get("step", 0)))
        state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=part.owner.device)

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model the weights that were set; a collective."""
        if self._is_partitioned:
            self._wrapper.checkpoint_event_prologue()
            for part, (_, parameter) in zip(self._partitions(), self._trained, strict=True):
                parameter.ds_tensor.view(-1).narrow(0, 0, part.size).copy_(part.of(part.owner))
            self._wrapper.checkpoint_event_epilogue()
        elif self._is_cut:
            self._wrapper.update_lp_params()

    def _cuts(self) -> Iterator[Part]:
        """Stages 1 and 2."""
        owners = [group["params"][0] for group in self._optimizer.param_groups]
        for name, parameter in self._trained:
            if (held := parameter._hp_mapping) is not None:
                yield Part(
                    name=name,
                    shape=tuple(parameter.shape),
                    start=held.lp_fragment_address.start,
                    size=held.lp_fragment_address.numel,
                    owner=owners[held.param_group_index],
                    offset=held.hp_fragment_address.start,
                )

    def _partitions(self) -> Iterator[Part]:
        """Stage 3; a range may be empty, where a parameter has fewer numbers than there are ranks."""
        places: dict[int, tuple[torch.Tensor, int]] = {}
        for owner, parameters in zip(
            self._wrapper.fp32_partitioned_groups_flat, self._wrapper.fp16_groups, strict=True
        ):
            offset = 0
            for parameter in parameters:
                places[id(parameter)] = owner, offset
                offset += parameter.partition_numel()
        rank = torch.distributed.get_rank()
        for name, parameter in self._trained:
            owner, offset = places[id(parameter)]
            n = parameter.partition_numel()
            start = min(rank * n, parameter.ds_numel)
            size = min(n, parameter.ds_numel - start)
            yield Part(name, tuple(parameter.ds_shape), start, size, owner, offset)


def share(parts: list[Part], rank: int, world_size: int) -> list[Part]:
    """A rank's part of numbers that all ranks hold: one of W cuts of the line of them, as equal as can be.

    Example: of parts of 6 and 4 numbers rank 0 of 2 has 5 of the first, and rank 1 has 1 of the first and the second.
    """
    total = sum(part.size for part in parts)
    first, end = rank * total // world_size, (rank + 1) * total // world_size
    shared, at = [], 0
    for part in parts:
        begin, stop = max(first - at, 0), min(end - at, part.size)
        if begin < stop:
            shared.append(part.cut(begin, stop))
        at += part.size
    return shared
