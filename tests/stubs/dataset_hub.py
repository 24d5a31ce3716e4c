"""A Hugging Face hub on loopback that takes commits to one data set repository, as far as `huggingface_hub` makes them."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class DatasetHub(ThreadingHTTPServer):
    """Keeps the files of a data set repository in memory.

    Attributes:
        name: of the repository, USER/NAME.
        files: content by path.
        commits: message of each commit, the first one is that of the creation.
        is_private: True if the repository was created as a private one.
    """

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files, self.commits = name, dict[str, bytes](), list[str]()
        self.is_private = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def head(self) -> str:
        """Id of the last commit."""
        return hashlib.sha1(repr(self.commits).encode(), usedforsecurity=False).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files to a folder, as a clone has them."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DatasetHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        hub = self.server
        lines = [json.loads(line) for line in self._read_body().splitlines()]
        if self.path == "/api/repos/create":
            hub.is_private = lines[0]["visibility"] == "private"
            hub.commits[:] = hub.commits or ["initial commit"]
            self._send(json.dumps({"url": f"{hub.url}/datasets/{hub.name}"}).encode())
        elif self.path == "/api/validate-yaml":
            self._send(b'{"warnings": [], "errors": []}')
        elif self.path == f"/api/datasets/{hub.name}/preupload/main":
            kept = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": each["path"], **kept} for each in lines[0]["files"]]
            self._send(json.dumps({"files": files}).encode())
        elif self.path == f"/api/datasets/{hub.name}/commit/main":
            header, *added = (line["value"] for line in lines)
            if header["parentCommit"] != hub.head:
                self._send(b'{"error": "A commit has happened since. Please refresh and try again."}', 412)
                return
            hub.files |= {each["path"]: base64.b64decode(each["content"]) for each in added}
            hub.commits.append(header["summary"])
            url = f"{hub.url}/datasets/{hub.name}/commit/{hub.head}"
            self._send(json.dumps({"commitUrl": url, "commitOid": hub.head}).encode())
        else:
            self._send(b'{"error": "Not found"}', 404)

    def _read_body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self) -> None:
        hub, resolved = self.server, f"/datasets/{self.server.name}/resolve/{self.server.head}/"
        if self.path.startswith(resolved) and (name := self.path.removeprefix(resolved)) in hub.files:
            self._send(hub.files[name], headers={"X-Repo-Commit": hub.head, "ETag": f'"{hub.head}"'})
        elif self.path.startswith(f"/api/datasets/{hub.name}"):
            siblings = [{"rfilename": each} for each in hub.files]
            self._send(json.dumps({"id": hub.name, "sha": hub.head, "siblings": siblings}).encode())
        else:
            self._send(b'{"error": "Not found"}', 404)

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_dataset_hub(name: str) -> Iterator[DatasetHub]:
    """Serve a hub for the data set repository `name` in the `with` block."""
    with DatasetHub(name) as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
