"""A Hugging Face hub on loopback with one model, as far as `huggingface_hub` asks for it."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "1" * 40


class StubHub(ThreadingHTTPServer):
    """Serves the files of a folder as the model `name`.

    Attributes:
        downloaded: names of the files that were downloaded.
    """

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.files = name, {path.name: path.read_bytes() for path in folder.iterdir()}
        self.downloaded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server
        if self.path.startswith(f"/api/models/{hub.model}/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(body), "oid": _hash(body)}
                for name, body in hub.files.items()
            ]
            self._send(json.dumps(files).encode())
        elif self.path.startswith(f"/api/models/{hub.model}"):
            siblings = [{"rfilename": each} for each in hub.files]
            self._send(json.dumps({"id": hub.model, "sha": COMMIT, "siblings": siblings}).encode())
        elif self.path.startswith(f"/{hub.model}/resolve/"):
            file = self.path.rpartition("/")[2]
            if self.command == "GET":
                hub.downloaded.append(file)
            self._send(hub.files[file])
        else:
            self._send(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        known = {"Content-Length": str(len(body)), "ETag": f'"{_hash(body)}"', "X-Repo-Commit": COMMIT}
        for key, value in (known | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _hash(body: bytes) -> str:
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()


@contextmanager
def serve_hub(name: str, folder: Path) -> Iterator[StubHub]:
    """Serve the files of a folder as the model `name` in the `with` block."""
    with StubHub(name, folder) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
