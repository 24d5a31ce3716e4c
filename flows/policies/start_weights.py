"""The weights of servers that sample by the start model: they have them already, and need their name alone."""

from collections.abc import Sequence

from flows.policies.parity import check_tokenizer, openings_of
from flows.policies.sync_report import SyncReport
from flows.running.run import Run
from flows.running.submission import Submission
from tasks.errors import ConfigError, SyncError
from tasks.serve.client import VllmClient
from tasks.serve.version import PolicyVersion
from tasks.sync.drive import Dispatch
from tasks.sync.order import WeightAnswer


class StartWeights:
    """Stands in the place of a WeightSync where there is no trainer."""

    calls = 0

    def __init__(self, run: Run) -> None:
        self._openings = openings_of(run)
        self.submitted = Submission()

    def is_joined(self, server: VllmClient, version: PolicyVersion) -> bool:
        """Always: no weights travel, so no route is needed."""
        return True

    def forget(self, server: VllmClient) -> None:
        """Nothing is kept of a server."""

    async def join(self, server: VllmClient, version: PolicyVersion) -> None:
        """See to it that a server answers, has our tokenizer, and has not taken weights of a trainer.

        Incarnation 0 is none that a trainer gave: it is what another run of the flow collect named.

        Raises:
            SyncError, RequestError: it does not answer.
            ConfigError: it has another tokenizer or chat template, or a trainer's weights.
        """
        if not await server.is_healthy():
            raise SyncError(f"server {server.url} does not answer /health")
        name = await server.version()
        if PolicyVersion.is_one(name) and PolicyVersion.parse(name).incarnation > 0:
            remedy = (
                f"it has weights that a trainer gave it, {name}: start it anew with the model to sample from"
            )
            raise ConfigError("serve.urls", server.url, remedy)
        await check_tokenizer(self._openings, server)

    async def send(self, servers: Sequence[VllmClient], version: PolicyVersion, take: object) -> None:
        """Nothing is sent."""

    async def take(self, server: VllmClient, version: PolicyVersion, dispatch: Dispatch) -> SyncReport:
        """As `send_verified`."""
        return await self.send_verified(server, version)

    async def send_verified(self, server: VllmClient, version: PolicyVersion) -> SyncReport:
        """Name the weights that a server has."""
        await server.set_version(str(version))
        return SyncReport(server.url)

    async def write(self, version: PolicyVersion) -> Sequence[str]:
        """There are no files."""
        return ()

    async def load(self, server: VllmClient, version: PolicyVersion, files: Sequence[str]) -> WeightAnswer:
        """Name the weights that a server has, which was started anew."""
        await server.set_version(str(version))
        return WeightAnswer(bytes=0, received_s=0.0, held_s=0.0)

    async def verify(self, server: VllmClient, version: PolicyVersion, answer: WeightAnswer) -> SyncReport:
        """There is nobody to compare a server with."""
        return SyncReport(server.url)

    async def clear(self) -> None:
        """There are no files."""
