"""A rank's side of the weight sync: what it has to give, and the sender of its part."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from tasks.errors import SyncError
from tasks.sync.buckets import TransferPlan, even_shares, lay_out, plan_transfer
from tasks.sync.link import serve_store
from tasks.sync.order import Place, Sent, Target, WeightOffer
from tasks.sync.place import this_machine
from tasks.sync.sender import Piece, WeightSender
from tasks.train.engine import Engine
from tasks.train.protocol import ServiceConfig
from tasks.train.weights import adapter_base, adapter_metas, adapter_weights, named_weights, weight_metas


class Transfer:
    """Gives away the weights of an engine; every rank has one.

    Args:
        config: settings of the service.
        rank: this rank.
        world_size: ranks.
    """

    def __init__(self, config: ServiceConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._plan: TransferPlan | None = None
        self._store: Any = None
        self._sender: WeightSender | None = None

    def prepare(self, engine: Engine) -> None:
        """Plan the transfer of a model that was just loaded; a collective.

        Raises:
            SyncError: adapters are to travel alone, and the start model's folder has not what they are added to.
        """
        metas = adapter_metas(engine.model) if self._sends_adapters else weight_metas(engine.model)
        tensors = lay_out((each.name, each.shape, str(each.dtype).removeprefix("torch.")) for each in metas)
        self._plan = plan_transfer(tensors, even_shares(tensors, 1), self._config.sync.bucket_bytes)
        self._base = asdict(adapter_base(engine.model)) if self._sends_adapters else None
        if self._store is None and self._rank == 0:
            self._store = serve_store(self._config.sync.host, self._config.sync.timeout_s)

    def offer(self) -> WeightOffer:
        """What this trainer has to give; asked on rank 0.

        Raises:
            SyncError: nothing is loaded.
        """
        if self._plan is None:
            raise SyncError("the trainer has nothing loaded, so it has no weights to offer")
        place = Place(this_machine(), "cpu")
        return WeightOffer(
            plan=self._plan.to_json(),
            host=self._config.sync.host,
            port=self._store.port,
            place=place.to_json(),
            base=self._base,
        )

    def send(self, engine: Engine, targets: list[Target]) -> list[Sent]:
        """Send every weight, or adapters alone; a collective. What became of each target counts on rank 0."""
        weights = (adapter_weights if self._sends_adapters else named_weights)(engine.model)
        try:
            if self._rank or self._plan is None:
                return []
            if self._sender is None:
                sync = self._config.sync
                self._sender = WeightSender(
                    0,
                    sync.host,
                    self._store.port,
                    timeout_s=sync.timeout_s,
                    stall_timeout_s=sync.stall_timeout_s,
                    straggler_s=sync.straggler_s,
                )
            pieces = (
                Piece(tensor.offset, data, False)
                for tensor, (_, data) in zip(self._plan.tensors, weights, strict=True)
            )
            return self._sender.send(self._plan, targets, pieces)
        finally:
            _drain(weights)

    @property
    def _sends_adapters(self) -> bool:
        lora = self._config.train.lora
        return lora.rank > 0 and lora.send == "adapters"


def _drain(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Gather what is left, so that ranks that gather with us do not wait."""
    for _ in weights:
        pass
