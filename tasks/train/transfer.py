"""A rank's side of the weight sync: what it has to give, and the sender of its part."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from tasks.errors import SyncError
from tasks.store.weights import remove_weights
from tasks.sync.buckets import TransferPlan, plan_transfer
from tasks.sync.link import serve_store
from tasks.sync.order import Place, Sent, Target, WeightOffer
from tasks.sync.place import this_machine
from tasks.sync.sender import WeightSender
from tasks.train.checkpoint_form import adapter_layers, weight_layers
from tasks.train.digests import digest_of
from tasks.train.engine import Engine
from tasks.train.every_rank import of_every_rank
from tasks.train.protocol import ServiceConfig
from tasks.train.weight_files import write_part
from tasks.train.weight_stream import WeightStream
from tasks.train.weights import adapter_base

T = TypeVar("T")


class Transfer:
    """Gives away the weights of an engine; every rank has one.

    Args:
        config: settings of the service.
        rank: this rank.
        world_size: ranks.
    """

    def __init__(self, config: ServiceConfig, rank: int, world_size: int) -> None:
        self._config, self._rank, self._world_size = config, rank, world_size
        self._stream: WeightStream | None = None
        self._plan = TransferPlan((), 0, ())
        self._base: dict[str, Any] | None = None
        self._store: Any = None
        self._port = 0
        self._sender: WeightSender | None = None

    def prepare(self, engine: Engine) -> None:
        """Plan the transfer of a model that was just loaded; a collective.

        Raises:
            SyncError: adapters are to travel alone, and the start model's folder has not what they are added to.
        """
        layers = (adapter_layers if self._sends_adapters else weight_layers)(engine.model)
        self._base = asdict(adapter_base(engine.model)) if self._sends_adapters else None
        stream = WeightStream(engine.model, layers, self._rank, self._world_size)
        self._plan = plan_transfer(stream.tensors, stream.shares, self._config.sync.bucket_bytes)
        self._stream = stream
        if not self._port:
            self._open_store()

    def offer(self) -> WeightOffer:
        """What this trainer has to give; asked on rank 0.

        Raises:
            SyncError: nothing is loaded.
        """
        self._loaded  # noqa: B018 - raises
        place = Place(this_machine(), "cpu")
        return WeightOffer(
            plan=self._plan.to_json(),
            host=self._config.sync.host,
            port=self._port,
            place=place.to_json(),
            base=self._base,
        )

    def send(self, engine: Engine, targets: Sequence[Target]) -> list[Sent]:
        """Send every weight, or adapters alone; a collective. What became of each target counts on rank 0.

        Raises:
            SyncError: a rank could not send; on rank 0 alone.
        """
        pieces = self._loaded.pieces(engine.model)

        def send() -> list[Sent]:
            try:
                return self._joined().send(self._plan, targets, pieces)
            finally:
                _drain(pieces)

        return [_of_all_ranks(each) for each in zip(*self._of_every_rank(send), strict=True)]

    def write(self, engine: Engine, place: str, name: str) -> list[str]:
        """Write what would be sent into files; a collective, whose result, where they are, counts on rank 0.

        Raises:
            SyncError: they could not be written; on rank 0 alone.
        """
        stream = self._loaded
        weights = stream.whole(engine.model, stream.owners({each.name for each in stream.tensors}))

        def write() -> str:
            try:
                return write_part(weights, place, name, self._rank, self._world_size)
            finally:
                _drain(weights)

        files = self._of_every_rank(write)
        if self._rank == 0:
            remove_weights(place, but=name)
        return files

    def digests(self, engine: Engine, names: Sequence[str]) -> dict[str, str]:
        """SHA-256 of tensors as they are sent, 64 hex digits, by name; a collective, whose result counts on rank 0.

        Raises:
            SyncError: there is no such tensor.
        """
        stream = self._loaded
        known = {each.name for each in stream.tensors}
        if missing := set(names) - known:
            raise SyncError(
                f"the trainer sends no {', '.join(sorted(missing))}; names are those of the offer"
            )
        weights = stream.whole(engine.model, stream.owners(names or known))
        every = self._of_every_rank(lambda: {name: digest_of(each) for name, each in weights})
        return {name: digest for each in every for name, digest in each.items()}

    @property
    def _loaded(self) -> WeightStream:
        if self._stream is None:
            raise SyncError("the trainer has nothing loaded, so it has no weights")
        return self._stream

    def _of_every_rank(self, work: Callable[[], T]) -> list[T]:
        return of_every_rank(work, self._rank, self._world_size)

    def _open_store(self) -> None:
        if self._rank == 0:
            self._store = serve_store(self._config.sync.host, self._config.sync.timeout_s)
            self._port = self._store.port
        if self._world_size > 1:
            port = [self._port]
            dist.broadcast_object_list(port, 0)
            (self._port,) = port

    def _joined(self) -> WeightSender:
        """This rank's sender."""
        if self._sender is None:
            sync = self._config.sync
            self._sender = WeightSender(
                self._rank,
                sync.host,
                self._port,
                timeout_s=sync.timeout_s,
                stall_timeout_s=sync.stall_timeout_s,
                straggler_s=sync.straggler_s,
            )
        return self._sender

    @property
    def _sends_adapters(self) -> bool:
        lora = self._config.train.lora
        return lora.rank > 0 and lora.send == "adapters"


def _of_all_ranks(sent: Sequence[Sent]) -> Sent:
    """What became of a target for which ranks sent their parts."""
    errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(sent) if each.error]
    n_bytes, seconds = sum(each.bytes for each in sent), max(each.seconds for each in sent)
    return Sent(sent[0].server, n_bytes, seconds, errors[0] if errors else "")


def _drain(rest: Iterable[object]) -> None:
    """Go on to the end, so that ranks that gather with us do not wait."""
    for _ in rest:
        pass
