"""Objects on S3 through s3fs: single requests, repeated after transient errors, with errors that name the remedy.

Endpoint, credentials, profile and the number of attempts come from the variables of every AWS tool: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_MAX_ATTEMPTS and so on. Every call blocks, so none is made on an event loop.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

import s3fs
from botocore.session import Session
from fsspec.asyn import sync

from rollmill.tasks.errors import ShardError, StoreError
from rollmill.tasks.observe.retries import Retries
from rollmill.tasks.store.s3.s3_errors import FAILURES, MissingObjectError, explain_error, is_transient

# Default attempts at one request, the first included; AWS_MAX_ATTEMPTS or the profile's max_attempts overrides it.
DEFAULT_ATTEMPTS = 8
BACKOFF_S, LONGEST_WAIT_S = 0.1, 10.0
# Files of twice this size or more are uploaded in parts of it (16 MiB); the object appears with the last part.
PART_BYTES = 16 << 20
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 15.0
# Most objects that one request removes.
REMOVED_AT_ONCE = 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class S3Object:
    """An object, or a range of it, as one request returned it.

    Attributes:
        etag: changes whenever the object is replaced.
        size: bytes of the whole object, also if only a range was requested.
        age_s: seconds since it was written, by the server's own clock.
    """

    content: bytes
    etag: str
    size: int
    age_s: float


@dataclass(frozen=True, slots=True)
class S3Objects:
    """Access to the S3 objects below BUCKET/PREFIX; keys are relative to it.

    Attributes:
        root: BUCKET/PREFIX, without s3:// and without a slash at its end.
        attempts: how often a request is tried at most; 0: as the environment configures.
    """

    root: str
    attempts: int = 0

    def path(self, key: str) -> str:
        """Return the s3:// path of a key, for messages."""
        return f"s3://{self.root}/{key}" if key else f"s3://{self.root}"

    def get(self, key: str, within: str = "") -> S3Object:
        """Read an object, or a range of it in the syntax of HTTP, such as "bytes=0-99", or "bytes=-100" for its end.

        Raises:
            MissingObjectError: there is none.
            ShardError: it cannot be read.
        """
        bucket, name = self._split(key)

        def send() -> S3Object:
            filesystem, options = s3_filesystem(), {"Range": within} if within else {}
            response = filesystem.call_s3("get_object", Bucket=bucket, Key=name, **options)
            try:
                content = sync(filesystem.loop, response["Body"].read)
            finally:
                response["Body"].close()
            # Both times are the server's, so that clocks of different machines need not agree.
            now = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
            size = int(response.get("ContentRange", "").rpartition("/")[2] or len(content))
            age_s = (now - response["LastModified"]).total_seconds()
            return S3Object(content, response["ETag"], size, age_s)

        return self._send(f"cannot read {self.path(key)}", ShardError, send)

    def find(self, key: str) -> S3Object | None:
        """Read an object; None if there is none. Raises ShardError if it cannot be read."""
        try:
            return self.get(key)
        except MissingObjectError:
            return None

    def put(self, key: str, content: bytes, *, replaces: str | None = None) -> str:
        """Create an object, or replace the one whose etag is `replaces`; returns the new etag.

        Raises:
            ObjectChangedError: it exists already, or has another etag. It may be our own, if a response was lost and the
                request repeated: read it to find out.
            StoreError: it cannot be written.
        """
        bucket, name = self._split(key)
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}

        def send() -> str:
            options = {"Bucket": bucket, "Key": name, "Body": content, **condition}
            return str(s3_filesystem().call_s3("put_object", **options)["ETag"])

        return self._send(f"cannot write {self.path(key)}", StoreError, send)

    def upload(self, source: Path, key: str, check: Callable[[], None] = lambda: None) -> None:
        """Upload a local file; `check` is called before each attempt, and may raise. Raises StoreError if it cannot be written."""
        bucket, name = self._split(key)
        # An upload has at most MAX_PARTS parts, so a very large file has larger ones.
        part_bytes = max(PART_BYTES, source.stat().st_size // (MAX_PARTS - 1) + 1)

        def send() -> None:
            # Before each attempt, since another process may take the run over while this one waits.
            check()
            s3_filesystem().put_file(
                str(source), f"{bucket}/{name}", chunksize=part_bytes, max_concurrency=PARTS_AT_ONCE
            )

        self._send(f"cannot write {self.path(key)}", StoreError, send)

    def download(self, key: str, target: Path) -> None:
        """Download an object to a local file; raises MissingObjectError if there is none, ShardError if it cannot be read."""
        bucket, name = self._split(key)

        def send() -> None:
            s3_filesystem().get_file(f"{bucket}/{name}", str(target), max_concurrency=PARTS_AT_ONCE)

        self._send(f"cannot read {self.path(key)}", ShardError, send)

    def address(self, key: str, lifetime_s: float) -> str:
        """Make a presigned HTTP URL of an object, valid for `lifetime_s` seconds, without a request."""
        bucket, name = self._split(key)
        return str(s3_filesystem().url(f"{bucket}/{name}", expires=int(lifetime_s)))

    def keys(self, start: str) -> dict[str, int]:
        """List the objects whose key begins with `start`: size in bytes by key, sorted; raises StoreError."""
        bucket, prefix = self._split(start)
        skipped = len(prefix) - len(start)
        found: dict[str, int] = {}
        token: dict[str, str] = {}
        while True:

            def send(token: dict[str, str] = token) -> Any:
                return s3_filesystem().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)

            page = self._send(f"cannot list {self.path(start)}", StoreError, send)
            found |= {each["Key"][skipped:]: each["Size"] for each in page.get("Contents", [])}
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Remove objects, of which some may be missing; `check` is called before each attempt, and may raise. Raises StoreError."""
        for first in range(0, len(keys), REMOVED_AT_ONCE):
            some = [self._split(key) for key in keys[first : first + REMOVED_AT_ONCE]]
            what = {"Objects": [{"Key": name} for _, name in some], "Quiet": True}

            def send(bucket: str = some[0][0], what: dict[str, object] = what) -> Any:
                check()
                return s3_filesystem().call_s3("delete_objects", Bucket=bucket, Delete=what)

            answer = self._send(f"cannot remove {self.path(keys[first])}", StoreError, send)
            # S3 answers 200 also if some of the objects could not be removed.
            for error in answer.get("Errors", []):
                raise StoreError(f"cannot remove s3://{some[0][0]}/{error['Key']}: {error.get('Message')}")

    def _split(self, key: str) -> tuple[str, str]:
        """Split a key into the name of the bucket and the key within the bucket."""
        bucket, _, name = f"{self.root}/{key}".partition("/")
        return bucket, name

    def _send(self, failed: str, kind: type[StoreError], send: Callable[[], T]) -> T:
        attempts = self.attempts
        try:
            # Read even if it does not count here, so that a wrong AWS_MAX_ATTEMPTS is reported by the first request.
            configured = _read_attempts()
            attempts = attempts or configured
            for attempt in Retries(
                is_transient, attempts=attempts, backoff_s=BACKOFF_S, longest_s=LONGEST_WAIT_S
            ):
                with attempt:
                    return send()
        except FAILURES as error:
            raise explain_error(error, failed, kind, attempts) from error
        raise AssertionError("the last attempt returns or raises")


@functools.cache
def _read_attempts() -> int:
    """Read AWS_MAX_ATTEMPTS, or max_attempts of the profile, else DEFAULT_ATTEMPTS; raises ValueError if it is no number from 1."""
    said = Session().get_config_variable("max_attempts")
    attempts = DEFAULT_ATTEMPTS if said is None else int(said)
    if attempts < 1:
        raise ValueError(f"attempts at a request must be at least 1, got {attempts}")
    return attempts


def s3_filesystem() -> Any:
    """Return this process's s3fs instance, which caches no listings and does not retry; `retries` does that.

    A forked child gets a separate instance, so that it never shares connections with its parent.
    """
    return _filesystem(os.getpid())


@functools.cache
def _filesystem(pid: int) -> Any:
    made = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
        },
    )
    made.retries = 1
    return made
