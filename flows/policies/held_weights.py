"""The weights of servers that have what is to be sampled from already, and need its name alone."""

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


class HeldWeights:
    """Stands in the place of a WeightSync where there is no trainer.

    Version 0 is the start model, of which it is believed that a server was started with it. Later versions only a trainer
    can have given a server, which names them.
    """

    calls = 0

    def __init__(self, run: Run) -> None:
        self._openings = openings_of(run)
        self.submitted = Submission("servers")

    def is_joined(self, server: VllmClient, version: PolicyVersion) -> bool:
        """Always: no weights travel, so no route is needed."""
        return True

    def forget(self, server: VllmClient) -> None:
        """Nothing is kept of a server."""

    async def join(self, server: VllmClient, version: PolicyVersion) -> None:
        """See to it that a server answers, has our tokenizer, and as far as its name says has the version's weights.

        Raises:
            SyncError, RequestError: it does not answer.
            ConfigError: it has another tokenizer or chat template, or other weights.
        """
        if not await server.is_healthy():
            raise SyncError(f"server {server.url} does not answer /health")
        if wrong := wrong_weights(await server.version(), version):
            raise ConfigError("serve.urls", server.url, wrong)
        await check_tokenizer(self._openings, server)

    async def prepare(self, version: PolicyVersion) -> None:
        """Nothing is compared."""

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


def wrong_weights(name: str, version: PolicyVersion) -> str:
    """What is wrong with a server for a version, and what to do; empty when nothing is.

    Args:
        name: of the server's weights. Incarnation 0 is none that a trainer gave: it is what another run without a
            trainer named.
        version: that is asked for; of whichever incarnation, since it is the same policy in each.
    """
    held = PolicyVersion.parse(name) if PolicyVersion.is_one(name) else None
    if held and (held.run, held.version) == (version.run, version.version):
        return ""
    if not version.version and not (held and held.incarnation):
        return ""
    return (
        f"it has the weights {name}, and version {version.version} of the run {version.run} is asked for; start it anew "
        "with that model if it is version 0, or leave serve.urls empty: then servers are started with it"
    )
