"""The servers of a run without a trainer: they have the policy's weights already and only get the version's name."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rollmill.flows.checks.gpu_assignment import assign_run_gpus
from rollmill.flows.failure import one_error
from rollmill.flows.policies.policy_export import export_policy
from rollmill.flows.policies.policy_servers import PolicyServers
from rollmill.flows.policies.server_parity import ServedRun
from rollmill.flows.policies.server_tokenizer import check_tokenizer
from rollmill.flows.policies.server_watch import WatchLimits, watch_server
from rollmill.flows.policies.services import ServerService, create_servers, start_services
from rollmill.flows.prefect_integration.progress import say
from rollmill.flows.run.live_run import Run
from rollmill.tasks.errors import ConfigError, SyncError
from rollmill.tasks.serve.policy_version import PolicyVersion


class FixedServers(PolicyServers):
    """The vLLM servers of a run without a trainer, which all serve one policy version.

    Args:
        run: the run that they sample for.
        servers: all of them.
        version: the version that they serve. Launched servers were started with it. An attached server must have its name;
            version 0 is also assumed of weights that no trainer has named.
    """

    def __init__(self, run: ServedRun, servers: Sequence[ServerService], version: PolicyVersion) -> None:
        super().__init__(run, servers)
        self._version = version

    async def admit_all(self) -> None:
        """Check every server, give its weights the version's name, and add it to the pool of servers that receive requests.

        Raises:
            SyncError, RequestError: one does not answer.
            ConfigError: one has another tokenizer, chat template or other weights.
        """
        for each in self.every:
            await self._check(each)
        with one_error():
            async with asyncio.TaskGroup() as group:
                for each in self.every:
                    group.create_task(self._survive(each, self._set_name(each, self._version)))
        self.are_up.set()

    async def rejoin(self, server: ServerService) -> None:
        """Return a server that failed and answers again to the pool; raises the errors of `admit_all`."""
        async with self._fail_on_error(server):
            if not await self._has_weights(server, str(self._version)):
                await self._check(server)
                await server.client.set_version(str(self._version))
            self._take_back(server, self._version)

    async def _check(self, server: ServerService) -> None:
        client = server.client
        if not await client.is_healthy():
            raise SyncError(f"server {client.url} does not answer /health")
        if not server.is_ours and (problem := find_wrong_weights(await client.version(), self._version)):
            raise ConfigError("serve.urls", client.url, problem)
        await check_tokenizer(self.run.openings, client)


@asynccontextmanager
async def open_fixed_policy(run: Run, version: PolicyVersion, logs: Path) -> AsyncIterator[None]:
    """Start vLLM servers with a policy version, or attach to servers that have it; failed ones are brought back in the block.

    Args:
        run: the run that they sample for.
        version: the version; one above 0 needs a checkpoint or serve.urls.
        logs: folder for the logs of launched servers.

    Raises:
        ServiceStartError: a server did not answer in time.
        ServiceDiedError: no server is left.
        ConfigError: a server has another tokenizer, chat template or other weights.
    """
    async with _start_model(run, version.version, logs) as model:
        say(f"starting the vLLM servers with version {version.version}")
        gpus = await asyncio.to_thread(assign_run_gpus, run.config, samples=True, trains=False)
        services = create_servers(run.config, model, logs, gpus)
        async with start_services(services):
            servers = FixedServers(ServedRun.of(run), services, version)
            limits = WatchLimits(run.config.max_restarts)
            async with asyncio.TaskGroup() as watching:
                await servers.admit_all()
                watches = [
                    watching.create_task(watch_server(servers, each, limits, servers.rejoin))
                    for each in services
                ]
                yield
                for task in watches:
                    task.cancel()


@asynccontextmanager
async def _start_model(run: Run, version: int, logs: Path) -> AsyncIterator[Path]:
    """Yield the model folder that launched servers load: the start model, or a later version in a temporary folder."""
    if not version or run.config.serve.urls:
        yield run.model
        return
    say(f"writing version {version} as a model")
    # On the disk of the run, which has room for models.
    run.folder.tmp.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run.folder.tmp) as scratch:
        output = Path(scratch) / "model"
        await export_policy(run.config, run.model, run.folder, run.id, version, output, logs / "export.log")
        yield output


def find_wrong_weights(name: str, version: PolicyVersion) -> str:
    """Return why a server cannot have a policy version, and the remedy; empty if it can.

    Args:
        name: of the server's weights. Incarnation 0 means that no trainer gave them: another run without a trainer
            named them.
        version: the version that the run needs; it is the same policy in every incarnation.
    """
    found = PolicyVersion.parse(name) if PolicyVersion.is_one(name) else None
    if found and (found.run, found.version) == (version.run, version.version):
        return ""
    if not version.version and not (found and found.incarnation):
        return ""
    return (
        f"it has the weights {name}, and the run needs version {version.version} of run {version.run}; restart it "
        "with that model if that is version 0, or leave serve.urls empty so that servers are launched with it"
    )
