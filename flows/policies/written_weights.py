"""The files from which servers load weights: written by the trainer on request, whole or as changes, and removed at the end."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollmill.tasks.serve.policy_version import PolicyVersion
from rollmill.tasks.serve.vllm_client import VllmClient
from rollmill.tasks.store.checkpoints.weight_snapshots import remove_weights, weight_urls
from rollmill.tasks.sync.broadcast import FILES
from rollmill.tasks.sync.weight_messages import SendTarget
from rollmill.tasks.train.service.commands import WriteWeights
from rollmill.tasks.train.service.trainer_client import TrainerClient


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
