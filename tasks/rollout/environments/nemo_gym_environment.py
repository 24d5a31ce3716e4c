"""The environment `nemo_gym`: tasks of NeMo Gym, whose resources server runs the tools and verifies the episode.

The protocol is that of NVIDIA-NeMo/Gym: POST /seed_session, POST /NAME for each call of a tool, and POST /verify, which returns the reward.
"""

import asyncio
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from aiohttp import ClientSession, ClientTimeout, CookieJar
from pydantic import Field

from rollmill.tasks.errors import ConfigError, EpisodeError
from rollmill.tasks.rollout.config import PromptsConfig, RolloutConfig
from rollmill.tasks.rollout.environment import Conversation, Episode, Example, Message, Split, TokenCounts
from rollmill.tasks.rollout.environments.endpoint import chat_wire, responses_wire
from rollmill.tasks.rollout.environments.endpoint.chat_wire import Wire
from rollmill.tasks.rollout.environments.openenv_environment import check_url, guard_connection
from rollmill.tasks.rollout.environments.prompts import CRC_RANGE, prompts_error

ASKED = "responses_create_params"
"""Field of a task with the request that the policy is asked: its messages and tools."""
CLOSE_S = 4.0
"""Seconds in which a truncated episode is verified: it has five to close (EpisodePlayer.cut_grace_s)."""
SHOWN_ERROR = 500


class _Verdict(msgspec.Struct):
    """What /verify returns, besides further fields; `mask_sample`: the reward measures no policy, since something else failed."""

    reward: float
    mask_sample: bool = False
    failure_reason: str | None = None


class NemoGym:
    """Environment of a resources server, with the tasks of the file in `rollout.prompts`, a line each.

    Args:
        url: address of the server.
        config: settings of the file; of these path, held_out_path and held_out_share are used.
    """

    name = "nemo_gym"
    # Each task has its tools.
    tools = ()
    stop = ()

    def __init__(self, url: str, config: PromptsConfig) -> None:
        self._url, self._tasks = url.rstrip("/"), read_tasks(config)

    @classmethod
    def from_config(
        cls,
        config: RolloutConfig,
        *,
        url: Annotated[str, Field(description="Address of the resources server.")],
    ) -> Self:
        """Read the tasks; ConfigError names a wrong argument, or the line of the first wrong task."""
        check_url(url)
        return cls(url, config.prompts)

    def size(self, split: Split) -> int:
        return len(self._tasks[split])

    async def example(self, split: Split, index: int) -> Example:
        return self._tasks[split][index]

    def episode(self, example: Example, seed: int) -> Episode:
        task: Any = example.content["task"]
        return NemoGymEpisode(self._url, task)


def read_tasks(config: PromptsConfig) -> Mapping[Split, Sequence[Example]]:
    """Read the tasks of both splits; without a file of held-out ones, a share is chosen by the crc32 of what the policy is asked.

    Raises:
        ConfigError: names the file and the line of what is wrong.
    """
    if not config.path:
        raise ConfigError("rollout.prompts.path", "", "give the .jsonl file with the tasks")
    tasks = _read_file(config, config.path)
    if config.held_out_path:
        return {"train": tasks, "held_out": _read_file(config, config.held_out_path)}

    def is_held_out(task: Any) -> bool:
        asked = json.dumps(task.content["task"][ASKED]["input"])
        return zlib.crc32(asked.encode()) < config.held_out_share * CRC_RANGE

    return {
        "train": [each for each in tasks if not is_held_out(each)],
        "held_out": [each for each in tasks if is_held_out(each)],
    }


def _read_file(config: PromptsConfig, path: str) -> Sequence[Example]:
    tasks: list[Example] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise prompts_error(config, path, f"cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = msgspec.json.decode(line, type=dict[str, Any])
            _read_request(task[ASKED])
        except (msgspec.DecodeError, KeyError, TypeError, UnicodeError, EpisodeError) as error:
            remedy = f"line {number} has no {ASKED} with input and tools: {type(error).__name__}: {error}"
            raise prompts_error(config, path, remedy) from error
        tasks.append(Example(f"{path}:{number}", {"task": task}))
    return tasks


def _read_request(asked: Wire) -> Conversation:
    """Return the messages and tools that the policy is asked with; raises EpisodeError for other forms."""
    responses_wire.check_request(asked)
    request = chat_wire.check_request(responses_wire.chat_request(asked))
    return Conversation([chat_wire.message_from_wire(each) for each in request["messages"]], request["tools"])


class NemoGymEpisode:
    """A session of the resources server, which knows it by its cookies, and the response that the policy gives in it."""

    def __init__(self, url: str, task: Mapping[str, Any]) -> None:
        self._url, self._task = url, task
        self._asked: Mapping[str, Any] = task[ASKED]
        self._http: ClientSession | None = None
        self._items: list[Mapping[str, Any]] = []
        self._counts = TokenCounts(0, 0)
        self._n_turns = self._n_calls = 0
        self._outcome: Mapping[str, object] | None = None

    def take_counts(self, counts: TokenCounts) -> None:
        """Add the token counts of a turn to those of the response."""
        self._counts = TokenCounts(*(a + b for a, b in zip(self._counts, counts, strict=True)))

    def take_cut(self, message: Message) -> None:
        """Add the message that was cut to the response, as NeMo Gym's agents do."""
        self._items += responses_wire.output_items(
            chat_wire.assistant_message(message.content, self._n_turns)
        )

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message] | Conversation:
        if not messages:
            # The cookies of a server that has an address and no name are kept too.
            self._http = ClientSession(timeout=ClientTimeout(None), cookie_jar=CookieJar(unsafe=True))
            await self._post("seed_session", self._task)
            return _read_request(self._asked)
        said = chat_wire.assistant_message(messages[-1].content, self._n_turns)
        self._n_turns += 1
        self._items += responses_wire.output_items(said)
        if calls := said.get("tool_calls"):
            return [await self._call(each) for each in calls]
        self._outcome = await self._verify()
        return ()

    async def close(self) -> Mapping[str, object]:
        """Verify an episode that was truncated, end the session and return the reward."""
        if self._http is None:
            return {}
        async with self._http:
            if self._outcome is None:
                try:
                    async with asyncio.timeout(CLOSE_S):
                        return await self._verify()
                except (EpisodeError, TimeoutError) as error:
                    return {
                        "error": str(error) or f"the server at {self._url} did not verify it in {CLOSE_S:g} s"
                    }
        return self._outcome

    async def _call(self, call: Wire) -> Message:
        """Call a tool and return what the policy is shown, which may be an error, as NeMo Gym's agents do."""
        function, self._n_calls = call["function"], self._n_calls + 1
        name, known = function["name"], [each.get("name") for each in self._asked.get("tools") or ()]
        if name in known:
            _, shown = await self._request(name, json.loads(function["arguments"]))
        else:
            # What the policy names is no part of an address.
            shown = json.dumps(
                {"error": f"there is no tool {name!r}, only {', '.join(map(str, known)) or 'none'}"}
            )
        self._items.append({"type": "function_call_output", "call_id": call["id"], "output": shown})
        return Message("tool", shown, name=name if name in known else "error", tool_call_id=call["id"])

    async def _verify(self) -> Mapping[str, object]:
        response = responses_wire.response(self._items, self._counts, self._asked)
        answer = await self._post("verify", {**self._task, "response": response})
        try:
            found = msgspec.json.decode(answer, type=dict[str, Any])
            verdict = msgspec.convert(found, _Verdict)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise EpisodeError(
                f"the server at {self._url} verified without a reward: {error}: {answer:.200}"
            ) from error
        if verdict.mask_sample:
            return {
                "error": f"the server at {self._url} has no valid reward: {verdict.failure_reason or 'no reason given'}"
            }
        given = {"reward", *self._task}
        numbers = {
            name: value
            for name, value in found.items()
            if isinstance(value, int | float) and abs(value) <= sys.float_info.max and name not in given
        }
        return {"reward": verdict.reward, "metrics": {**numbers, "calls": self._n_calls}}

    async def _post(self, path: str, body: Wire) -> str:
        """Return the text of an answer; raises EpisodeError if the server refuses the request or fails."""
        status, text = await self._request(path, body)
        if status >= 400:
            raise EpisodeError(
                f"the server at {self._url} answered /{path} with {status}: {text[:SHOWN_ERROR]}"
            )
        return text

    async def _request(self, path: str, body: object) -> tuple[int, str]:
        assert self._http is not None
        with guard_connection(self._url):
            async with self._http.post(f"{self._url}/{path}", json=body) as answer:
                return answer.status, (await answer.read()).decode(errors="replace")
