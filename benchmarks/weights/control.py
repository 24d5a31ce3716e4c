"""A control API by HTTP in which every call costs a set time more, and its client that counts calls."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Route = Callable[[Any], Any]


def serve(address: str, port: int, routes: Mapping[str, Route], delay_s: float) -> None:
    """Answer POST /NAME with JSON for ever."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, -1

        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(delay_s)
            answer = json.dumps(routes[self.path[1:]](given)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer((address, port), Handler).serve_forever()


class Client:
    """Calls one control API, from any thread, over a connection for each thread.

    Attributes:
        n_calls: so far.
    """

    def __init__(self, address: str, port: int) -> None:
        self.n_calls = 0
        self._where, self._own = (address, port), threading.local()

    def call(self, name: str, given: Any = None) -> Any:
        """The answer's JSON."""
        self.n_calls += 1
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(*self._where)
        self._own.connection.request("POST", f"/{name}", json.dumps(given).encode())
        answer = self._own.connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{name}: {answer.status} {body!r}")
        return json.loads(body)

    def wait_until_up(self, timeout_s: float) -> None:
        """Return when it answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.call("cpu_s")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                self._own.__dict__.clear()
                time.sleep(0.1)
        self.n_calls = 0
