"""The trainer's side of the weight sync: the sender on rank 0, in step with the other ranks."""

import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from tasks.errors import RequestError
from tasks.train.engine import Engine
from tasks.train.protocol import ServiceConfig
from tasks.train.weights import adapter_base, adapter_metas, adapter_weights, named_weights, weight_metas


class Transfer:
    """Sends the weights of an engine; every rank has one, only rank 0's talks to servers."""

    def __init__(self, config: ServiceConfig, *, is_sender: bool) -> None:
        self._config, self._is_sender = config, is_sender
        self._sender: Any = None
        self._making = threading.Lock()  # servers join side by side, each on a thread of the control API

    @property
    def sender(self) -> Any:
        """Rank 0's WeightSender, made at first use."""
        with self._making:
            if self._sender is None:
                from tasks.sync.sender import WeightSender

                self._sender = WeightSender(
                    self._config.sync_host, self._config.bucket_bytes, self._config.sync_timeout_s
                )
            return self._sender

    def rendezvous(self, engine: Engine | None) -> dict[str, Any]:
        """Where servers join, and which folder they need there: {"host", "port", "base"}.

        Raises:
            SyncError: adapters are to travel alone, and the start model's folder has not what they are added to.
        """
        base = adapter_base(engine.model).folder if engine and self._sends_adapters else ""
        return {**self.sender.rendezvous(), "base": base}

    def plan(self, engine: Engine | None) -> dict[str, Any]:
        """What the servers must know beforehand, as JSON."""
        if engine is None:
            raise RequestError("the trainer has nothing loaded, so it has no weights to plan for")
        if not self._sends_adapters:
            return dict(self.sender.plan(weight_metas(engine.model)))
        base = asdict(adapter_base(engine.model))
        return {**self.sender.plan(adapter_metas(engine.model)), "base": base}

    def send(self, engine: Engine, servers: list[str]) -> dict[str, Any]:
        """Send every weight, or adapters alone, in order; a collective, also when a server fails half-way.

        Raises:
            SyncError: on rank 0 alone, when every rank is done.
        """
        weights = (adapter_weights if self._sends_adapters else named_weights)(engine.model)
        try:
            return dict(self.sender.send(servers, weights)) if self._is_sender else {}
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
