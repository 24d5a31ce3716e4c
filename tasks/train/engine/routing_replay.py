"""Replays routing: the tokens of a mixture of experts go to the experts that computed them when they were sampled.

The weights of those experts are the model's own, of its present router over the stored experts, so that the router
has a gradient: "Rollout Routing Replay", Ma et al. 2025, arXiv:2510.11370, section 3. What the router would have chosen
does not count.
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmill.tasks.errors import BatchRefusedError, ConfigError
from rollmill.tasks.train.engine.private_deepspeed import whole_shape
from rollmill.tasks.train.engine.private_transformers import is_router

NO_EXPERT = -1
"""Marks all experts of a token that has none stored: the router chooses them."""

_FIELD = "train.replay_routing"
_N_PROBES = 64
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Gate:
    """How a router computes the weights of its chosen experts from its logits.

    Attributes:
        is_softmax: True for a softmax over all experts, False for a sigmoid of each logit.
        is_normalized: True if the weights are divided by their sum over the chosen experts.
        scale: factor by which the weights are multiplied last.
    """

    is_softmax: bool
    is_normalized: bool
    scale: float = 1.0

    def weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return [T, k] single-precision weights of the chosen experts.

        Args:
            logits: [T, experts] output of the router.
            chosen: [T, k] indices of the chosen experts.
        """
        precise = logits if logits.dtype == torch.float64 else logits.float()
        probabilities = precise.softmax(-1) if self.is_softmax else precise.sigmoid()
        weights = probabilities.gather(-1, chosen)
        if self.is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale


class RoutingReplay:
    """Makes a model's routers choose the experts that are stored with the rollouts.

    The hooks also apply when activations are computed again in the backward pass.

    Attributes:
        experts: [T, layers, k] experts of the tokens of the next forward pass, in their order there, NO_EXPERT where none are
            stored; None: the routers choose.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.experts: torch.Tensor | None = None
        self._routers = find_routers(model)
        gates = {type(each): _probe_gate(each) for each in self._routers.values()}
        self._n_layers = int(model.config.get_text_config().num_hidden_layers)
        for place, router in enumerate(self._routers.values()):
            router.register_forward_hook(self._hook(place, gates[type(router)]))

    def check(self, routing: Sequence[np.ndarray], names: Sequence[str]) -> None:
        """Refuse stored experts that this model does not have.

        Args:
            routing: [B][tokens, layers, k] stored experts.
            names: [B] ids of the trajectories.

        Raises:
            BatchRefusedError: names a trajectory, what is stored of it, and what the model has.
        """
        router = next(iter(self._routers.values()))
        layers, k, n_experts = {len(self._routers), self._n_layers}, router.top_k, router.num_experts
        for stored, name in zip(routing, names, strict=True):
            if stored.size and (
                stored.shape[1] not in layers or stored.shape[2] != k or int(stored.max()) >= n_experts
            ):
                raise BatchRefusedError(
                    f"trajectory {name}: its routed experts have {stored.shape[1]} layers, {stored.shape[2]} experts a token, "
                    f"the last one number {stored.max()}; the model has {' or '.join(map(str, sorted(layers)))} layers, {k} of "
                    f"{n_experts} experts a token: is it the model that sampled?"
                )

    def _hook(self, place: int, gate: Gate) -> Callable[..., Any]:
        layer = list(_layer_numbers(self._routers))[place]

        def replay(
            _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...] | None:
            if self.experts is None:
                return None
            logits, weights, own = output
            # What is stored has either all decoder layers or those with a router.
            is_by_router = self.experts.shape[1] == len(self._routers)
            stored = self.experts[:, place if is_by_router else layer].to(own.dtype)
            chosen = torch.where(stored == NO_EXPERT, own, stored)
            return logits, gate.weights(logits, chosen).to(weights.dtype), chosen

        return replay


def experts_at(routing: Sequence[np.ndarray], places: Sequence[np.ndarray], n_tokens: int) -> torch.Tensor:
    """Arrange the rows' stored experts by position in a micro-batch: [n_tokens, layers, k] int16, NO_EXPERT where none are.

    Args:
        routing: [M][tokens, layers, k] stored experts of one or more rows; a row's last token, and maybe others, have none.
        places: [M][tokens of the row] positions of each row's tokens in the micro-batch.
        n_tokens: number of positions, padding included.
    """
    experts = np.full((n_tokens, *routing[0].shape[1:]), NO_EXPERT, np.int16)
    for stored, place in zip(routing, places, strict=True):
        experts[place[: len(stored)]] = stored[: len(place)]
    return torch.from_numpy(experts)


def find_routers(model: PreTrainedModel) -> dict[str, Any]:
    """Return the routers of a mixture of experts by name, in the order of the layers.

    Raises:
        ConfigError: the model is no mixture of experts, or its routers are not separate modules in transformers.
    """
    routers = {name: each for name, each in model.named_modules() if is_router(each)}
    if not routers:
        raise ConfigError(
            _FIELD, True, f"{type(model).__name__} has no routers that can be replayed; set it to false"
        )
    return routers


def _probe_gate(router: Any) -> Gate:
    """Find the Gate that a router follows by trying the known ones on a copy with random weights.

    Raises:
        ConfigError: the router follows none of the known ones.
    """
    # A copy: the probe sets random weights.
    probed = copy.deepcopy(router).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for each, partitioned in zip(probed.parameters(), router.parameters(), strict=True):
        each.data = torch.randn(whole_shape(partitioned), generator=generator)
    for buffer in probed.buffers():
        buffer.zero_()
    name = type(router).__name__
    try:
        with torch.no_grad():
            hidden = (
                torch.randn(_N_PROBES, probed.weight.shape[-1], generator=generator)
                / probed.weight.shape[-1] ** 0.5
            )
            logits, weights, chosen = probed(hidden)
            scale = float(getattr(probed, "routed_scaling_factor", 1.0))
            known = [
                Gate(soft, normal, by)
                for by in {1.0, scale}
                for soft in (True, False)
                for normal in (True, False)
            ]
            for gate in known:
                if torch.allclose(gate.weights(logits, chosen), weights.float(), rtol=1e-4, atol=1e-6):
                    return gate
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(_FIELD, True, f"{name} cannot be replayed ({error}); set it to false") from error
    raise ConfigError(
        _FIELD, True, f"{name} weights its experts in a way that is not known here; set it to false"
    )


def _layer_numbers(names: dict[str, Any]) -> list[int]:
    """Return the decoder layer of each router, from its name: "model.layers.3.mlp.gate" is of layer 3."""
    found = [_LAYER.search(name) for name in names]
    return [int(each.group(1)) if each else place for place, each in enumerate(found)]
