"""The environment `agent`: a program plays each episode; it knows only the address of an endpoint and a key.

The program is a command, which gets the messages of the problem on its standard input, or an HTTP service, to which they are
sent. Each of its requests for a completion is a turn of the policy.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol, Self
from urllib.parse import urlsplit

import httpx

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.processes.launched_process import LaunchedProcess, split_command
from rollmill.tasks.processes.python_child import SAFE_PATH
from rollmill.tasks.rollout.config import RolloutConfig
from rollmill.tasks.rollout.environment import Episode, Example, Message, Split, WarmUp, make_environment
from rollmill.tasks.rollout.environment_calls import check_opening
from rollmill.tasks.rollout.environments.endpoint.chat_wire import Said, Wire, leave_sampling_to_the_run
from rollmill.tasks.rollout.environments.endpoint.policy_endpoint import PolicyEndpoint
from rollmill.tasks.rollout.environments.endpoint.requesting_episode import (
    AskPolicy,
    RequestingEpisode,
    RolloutEnd,
)
from rollmill.tasks.user_code.worker_process import select_user_variables

FIELD = "rollout.agent.command"
# Bytes at the end of a program's output that are kept for the scorer, and of its errors for the row.
KEPT_OUTPUT, KEPT_ERRORS = 65_536, 2_000
# Seconds between SIGTERM and SIGKILL; an episode has a few seconds to close.
STOP_GRACE_S = 1.0
# The flow tokenizes a conversation in its event loop, a megabyte in about a second.
MAX_REQUEST_BYTES = 2 << 20
_CHUNK_BYTES = 65_536


class Program(Protocol):
    """A program that plays an episode."""

    async def run(self, messages: Sequence[Message], url: str, key: str) -> str:
        """Run to the end and return the output; the program ends if this is cancelled.

        Args:
            messages: the problem's opening.
            url: of the policy's endpoint, without a path.
            key: API key that names the episode.

        Raises:
            EpisodeError: the program failed.
        """


class Agent:
    """Environment with the problems of another one, each played by a program.

    Args:
        config: settings of rollouts.
        program: plays the episodes.
    """

    name = "agent"
    tools = ()

    def __init__(self, config: RolloutConfig, program: Program) -> None:
        self._program, self._host = program, config.agent.host
        self._problems = make_environment(config.model_copy(update={"environment": config.agent.problems}))
        self.stop = self._problems.stop
        if isinstance(self._problems, WarmUp):
            self.warm_up_corpus = self._problems.warm_up_corpus

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Create the environment; ConfigError names a wrong setting of `rollout.agent`."""
        agent = config.agent
        if agent.problems.name == cls.name:
            raise ConfigError(
                "rollout.agent.problems", cls.name, "name the environment whose problems it is given"
            )
        if bool(agent.command) == bool(agent.url):
            raise ConfigError(FIELD, agent.command, "give either a command or rollout.agent.url")
        return cls(config, Service(agent.url) if agent.url else AgentCommand.from_config(config))

    def size(self, split: Split) -> int:
        return self._problems.size(split)

    async def example(self, split: Split, index: int) -> Example:
        return await self._problems.example(split, index)

    def episode(self, example: Example, seed: int) -> Episode:
        problem = self._problems.episode(example, seed)

        async def play(asked: AskPolicy) -> RolloutEnd:
            try:
                return await self._play(problem, asked)
            finally:
                await problem.close()

        return RequestingEpisode(play, None, is_agent=True)

    async def _play(self, problem: Episode, asked: AskPolicy) -> RolloutEnd:
        opening = check_opening(await problem.reply(()), self._problems)
        one_at_a_time, n_requests = asyncio.Lock(), 0

        async def ask(request: Wire) -> Said:
            nonlocal n_requests
            async with one_at_a_time:
                n_requests += 1
                return await asked(self.name, leave_sampling_to_the_run(request))

        async with PolicyEndpoint(self._host, MAX_REQUEST_BYTES) as endpoint:
            key = f"rollmill-{secrets.token_urlsafe()}"
            endpoint.asked[key] = ask
            try:
                output = await self._program.run(opening.messages, endpoint.url, key)
            except EpisodeError as error:
                refused = f"; a request was refused: {endpoint.refusal}" if endpoint.refusal else ""
                return RolloutEnd({}, f"{error}{refused}")
        if not n_requests:
            return RolloutEnd(
                {}, f"the agent ended without a request to the endpoint; its output: {output[:500]!r}"
            )
        return RolloutEnd({"output": output})


class AgentCommand:
    """A program that is started for each episode; it ends with the episode, and so does all that it started.

    Args:
        arguments: program and arguments.
        variables: environment variables, to which those of the endpoint are added.
    """

    def __init__(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        self._arguments, self._variables = arguments, variables

    @classmethod
    def from_config(cls, config: RolloutConfig) -> Self:
        """Read the command; ConfigError if it cannot be parsed, or its program is not found."""
        arguments = split_command(FIELD, config.agent.command)
        variables = select_user_variables(config.env_variables)
        # It would hide the modules beside a script of the agent.
        variables.pop(SAFE_PATH, None)
        return cls(arguments, variables)

    async def run(self, messages: Sequence[Message], url: str, key: str) -> str:
        environment = {
            **self._variables,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            # Clients of all kinds read one or the other.
            **{
                name: _join(self._variables.get(name, ""), urlsplit(url).hostname or "")
                for name in ("NO_PROXY", "no_proxy")
            },
        }
        problem, (output, said), (errors, complained) = _hold(write_problem(messages)), os.pipe(), os.pipe()
        given = (problem, said, complained)
        redirect = f'exec "$@" </proc/self/fd/{problem} >/proc/self/fd/{said} 2>/proc/self/fd/{complained}'
        with os.fdopen(output, "rb", 0) as output_pipe, os.fdopen(errors, "rb", 0) as errors_pipe:
            try:
                # It ends all that the program started, in whatever session.
                process = LaunchedProcess.start(
                    "agent",
                    ["sh", "-c", redirect, "sh", *self._arguments],
                    log=None,
                    env=environment,
                    stop_grace_s=STOP_GRACE_S,
                    pass_fds=given,
                )
            except OSError as error:
                raise EpisodeError(f"the agent cannot be started: {error}") from error
            finally:
                for descriptor in given:
                    os.close(descriptor)
            async with asyncio.TaskGroup() as streams:
                last_output, last_errors = bytearray(), bytearray()
                reading = {
                    streams.create_task(_read_end(output_pipe, last_output, KEPT_OUTPUT)),
                    streams.create_task(_read_end(errors_pipe, last_errors, KEPT_ERRORS)),
                }
                try:
                    status = await process.wait()
                finally:
                    await asyncio.shield(process.stop())
                    # A process that killed its supervisor may keep them open.
                    await asyncio.wait(reading, timeout=STOP_GRACE_S)
                    for each in reading:
                        each.cancel()
        if status < 0:
            raise EpisodeError(
                f"the agent's supervisor was ended by signal {-status}; what the agent started may still run"
            )
        if status:
            text = last_errors.decode(errors="replace").strip()
            raise EpisodeError(f"the agent ended with exit status {status}: {text}")
        return last_output.decode(errors="replace")


class Service:
    """A program that listens for episodes: each is one POST request, whose answer is the output.

    The body is {"messages": [...], "base_url": ..., "api_key": ...}; the address is that for OpenAI's clients.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, messages: Sequence[Message], url: str, key: str) -> str:
        body = {
            "messages": json.loads(write_problem(messages)),
            "base_url": f"{url}/v1",
            "api_key": key,
        }
        try:
            # The trajectory's deadline ends it.
            async with (
                httpx.AsyncClient(timeout=None) as client,
                client.stream("POST", self._url, json=body) as answer,
            ):
                kept = bytearray()
                async for chunk in answer.aiter_bytes():
                    kept += chunk
                    del kept[:-KEPT_OUTPUT]
        except httpx.HTTPError as error:
            raise EpisodeError(
                f"no answer from rollout.agent.url = {self._url}: {type(error).__name__}: {error}"
            ) from error
        output = kept.decode(errors="replace")
        if not answer.is_success:
            raise EpisodeError(
                f"rollout.agent.url = {self._url} answered {answer.status_code}: {output[-KEPT_ERRORS:]}"
            )
        return output


def write_problem(messages: Sequence[Message]) -> bytes:
    """Return what a program is given: the list of messages as JSON of OpenAI's chat completions."""
    listed: list[dict[str, Any]] = [each.as_json() for each in messages]
    return json.dumps(listed).encode()


def _join(hosts: str, host: str) -> str:
    return f"{hosts},{host}" if hosts else host


def _hold(content: bytes) -> int:
    """Return the descriptor of a file in memory with this content."""
    descriptor = os.memfd_create("problem")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


async def _read_end(pipe: IO[bytes], kept: bytearray, n_bytes: int) -> None:
    """Read a pipe to its end; `kept` always has the last `n_bytes` so far."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while chunk := await stream.read(_CHUNK_BYTES):
            kept += chunk
            del kept[:-n_bytes]
    finally:
        transport.close()
