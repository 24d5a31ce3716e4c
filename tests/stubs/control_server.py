"""Servers of which only the control calls of a sync are there, many in one process: python -m tests.stubs.control_server N DELAY_S.

Every call takes DELAY_S before it is carried out. Prints the ports as a line of JSON, and for each line on its standard input
when each server last began to take weights: a line of JSON, nanoseconds since 1970 in the order of the ports.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import uvicorn

from rollmill.tasks.sync.weight_messages import ServerLocation, WeightUpdateResponse
from tests.stubs.trainer import LOGPROB

Scope = dict[str, Any]


class ControlServers:
    """Servers that differ by the port that they are asked at; without a framework, whose own time would be measured too.

    Attributes:
        started_ns: when each last began to take weights, by port.
    """

    def __init__(self, delay_s: float) -> None:
        self.started_ns: dict[int, int] = {}
        self._versions: dict[int, str] = {}
        self._delay_s = delay_s
        self._answers: dict[str, Callable[[int, Any], Any]] = {
            "GET /health": lambda port, _: None,
            "GET /weight_info": lambda port, _: {"weight_version": self._versions.get(port, "start")},
            "GET /rollmill/weights": lambda port, _: asdict(ServerLocation("here", "cpu")),
            "POST /rollmill/weights": self._take,
            "POST /tokenize": lambda port, body: {"tokens": list(body["prompt"].encode())},
            "POST /inference/v1/generate": lambda port, body: _prompt_logprobs(body["token_ids"]),
        }

    async def __call__(self, scope: Scope, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """One request."""
        content, more = b"", True
        while more:
            message = await receive()
            content, more = content + message["body"], message["more_body"]
        await asyncio.sleep(self._delay_s)
        answer = self._answers[f"{scope['method']} {scope['path']}"]
        body = json.dumps(answer(scope["server"][1], json.loads(content or b"null"))).encode()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    def _take(self, port: int, order: Any) -> dict[str, Any]:
        self.started_ns[port] = time.time_ns()
        self._versions[port] = order["version"]
        return asdict(WeightUpdateResponse(bytes=0, received_s=0.0, held_s=0.0))


def _prompt_logprobs(token_ids: list[int]) -> dict[str, Any]:
    by_position = [{str(token): {"logprob": LOGPROB}} for token in token_ids[1:]]
    choice = {"token_ids": [0], "finish_reason": "length"}
    return {"choices": [choice], "prompt_logprobs": [None, *by_position]}


async def main() -> None:
    n, delay_s = int(sys.argv[1]), float(sys.argv[2])
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(n)]
    ports, servers = [each.getsockname()[1] for each in sockets], ControlServers(delay_s)
    server = uvicorn.Server(uvicorn.Config(servers, lifespan="off", log_level="warning", access_log=False))
    serving = asyncio.create_task(server.serve(sockets))
    print(json.dumps(ports), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([servers.started_ns.get(port, 0) for port in ports]), flush=True)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
