"""What the trainer gives of its weights: an offer to send them, checksums, and files that it writes on request."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollmill.flows.policies.server_parity import Latest
from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.checkpoints.weight_snapshots import remove_weights, weight_urls
from rollmill.tasks.sync.broadcast import FILES
from rollmill.tasks.sync.weight_messages import SendTarget, WeightOffer
from rollmill.tasks.sync.weight_parity import compare_checksums, select_names
from rollmill.tasks.train.service.commands import DigestWeights, WriteWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient

# A sync that drops or mixes bytes shows within a few versions, since each version compares other tensors.
CHECKED_TENSORS = 8


class OfferedWeights:
    """The trainer's offer to send its weights, and checksums of them; each is fetched once for all servers.

    Attributes:
        n_offers: offers fetched so far.
    """

    def __init__(self, trainer: TrainerClient) -> None:
        self._trainer, self.n_offers = trainer, 0
        self._offers, self._digests = Latest[WeightOffer](), Latest[dict[str, str]]()

    async def offer(self, version: PolicyVersion) -> WeightOffer:
        """Return which weights the trainer can send and how to reach it; fetched once for each incarnation of the trainer."""

        async def fetch() -> WeightOffer:
            self.n_offers += 1
            return await self._trainer.offer()

        return await self._offers.get(str(version.incarnation), fetch)

    async def names(self, version: PolicyVersion) -> Sequence[str]:
        """Return the names of the tensors whose checksums are compared at a version."""
        names = [tensor.name for tensor in (await self.offer(version)).plan.tensors]
        return select_names(names, version.version, CHECKED_TENSORS)

    async def digests(self, version: PolicyVersion) -> Mapping[str, str]:
        """Return the SHA-256, 64 hex digits, of these tensors, by name; the trainer must be at the version."""

        async def fetch() -> dict[str, str]:
            names = await self.names(version)
            return await self._trainer.do(DigestWeights(names=list(names))) if names else {}

        return await self._digests.get(str(version), fetch)

    async def compare(self, server: str, version: PolicyVersion, found: Mapping[str, str]) -> None:
        """Raise ChecksumError, which names them, if a server's checksums of tensors differ from the trainer's."""
        compare_checksums(server, str(version), await self.digests(version), found)


class WeightFiles:
    """Has the trainer write its weights for servers that read files.

    Args:
        trainer: the trainer.
        location: where it writes them, of `weights_location`.
        timeout_s: seconds for which addresses of files on S3 are valid.

    Attributes:
        n_written: commands to write so far.
    """

    def __init__(self, trainer: TrainerClient, location: str, timeout_s: float) -> None:
        self._trainer, self._location, self._timeout_s = trainer, location, timeout_s
        self.n_written = 0

    async def write(
        self, version: PolicyVersion, snapshot: str = "", base_snapshot: str = ""
    ) -> Sequence[str]:
        """Have the trainer write a version; returns the paths or addresses from which servers read it.

        Args:
            version: the trainer's, whose weights are held still.
            snapshot: name under which the servers keep the weights; empty: they do not.
            base_snapshot: what all servers hold that read the files, which then have the changes of it; empty: whole weights.
        """
        self.n_written += 1
        command = WriteWeights(
            folder=self._location, version=version.version, snapshot=snapshot, base_snapshot=base_snapshot
        )
        files = await self._trainer.do(command)
        return weight_urls(files, self._timeout_s)

    async def write_for(
        self, routes: Mapping[VllmClient, SendTarget], version: PolicyVersion, snapshot: str = ""
    ) -> tuple[Mapping[VllmClient, SendTarget], Sequence[str]]:
        """Have the trainer write files if any route needs them: changes if all those servers hold the same snapshot, else the whole.

        Returns:
            The routes, each with the snapshot that its server gets changes of, and the paths or addresses of the files.
        """
        readers = {server: route for server, route in routes.items() if route.transport == FILES}
        if not readers:
            return routes, ()
        bases = {route.base_snapshot for route in readers.values()}
        base = bases.pop() if len(bases) == 1 else ""
        agreed = {server: replace(route, base_snapshot=base) for server, route in readers.items()}
        return {**routes, **agreed}, await self.write(version, snapshot, base)

    async def clear(self) -> None:
        """Remove the files that were written."""
        if self.n_written:
            await asyncio.to_thread(remove_weights, self._location)
