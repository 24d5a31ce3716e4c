"""Objects on S3, by way of s3fs: what one request does, sent again after transient errors, errors in words.

Endpoint, credentials, profile and the number of attempts are those of every AWS tool: AWS_ENDPOINT_URL,
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

from tasks.errors import ShardError, StoreError
from tasks.observe.retries import retries
from tasks.store.s3_errors import FAILURES, in_words, is_transient

DEFAULT_ATTEMPTS = 8
"""Attempts at one request, the first included, unless AWS_MAX_ATTEMPTS or the profile's max_attempts says otherwise."""
BACKOFF_S, LONGEST_WAIT_S = 0.1, 10.0
PART_BYTES = 16 << 20
"""A file of twice as much or more goes in parts of this size, which become an object in the moment the last is in."""
MAX_PARTS = 10_000
PARTS_AT_ONCE = 4
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 15.0
REMOVED_AT_ONCE = 1000
"""Most objects that one request removes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Object:
    """An object as one request found it.

    Attributes:
        etag: changes whenever the object is replaced.
        size: bytes of the whole object, however little of it was asked for.
        age_s: seconds since it was written, by the server's own clock.
    """

    content: bytes
    etag: str
    size: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects below BUCKET/PREFIX; keys are relative to it.

    Attributes:
        root: BUCKET/PREFIX, without s3:// and without a slash at its end.
        attempts: at one request; 0: as the environment says.
    """

    root: str
    attempts: int = 0

    def path(self, key: str) -> str:
        """Where a key lies, for messages."""
        return f"s3://{self.root}/{key}" if key else f"s3://{self.root}"

    def get(self, key: str, within: str = "") -> Object:
        """Read an object, or a part of it.

        Args:
            key: of the object.
            within: a range as HTTP has it: "bytes=0-99", or "bytes=-100" for its end.

        Raises:
            MissingObjectError: there is none.
            ShardError: it cannot be read.
        """
        bucket, name = self._split(key)

        async def request() -> Object:
            options = {"Range": within} if within else {}
            response = await filesystem()._call_s3("get_object", Bucket=bucket, Key=name, **options)
            async with response["Body"] as body:
                content = await body.read()
            headers = response["ResponseMetadata"]["HTTPHeaders"]
            now = parsedate_to_datetime(headers["date"])
            size = int(response.get("ContentRange", "").rpartition("/")[2] or len(content))
            return Object(content, response["ETag"], size, (now - response["LastModified"]).total_seconds())

        def send() -> Object:
            found: Object = sync(filesystem().loop, request)
            return found

        return self._sent(f"cannot read {self.path(key)}", ShardError, send)

    def put(self, key: str, content: bytes, *, replaces: str | None = None) -> str:
        """Write an object if it is not there, or if it is the one whose etag is `replaces`; returns its new etag.

        Raises:
            ObjectChangedError: it is there, or is another one by now; also when an answer was lost and the request
                sent again, so look whether it is yours.
            StoreError: it cannot be written.
        """
        bucket, name = self._split(key)
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}

        def send() -> str:
            options = {"Bucket": bucket, "Key": name, "Body": content, **condition}
            return str(filesystem().call_s3("put_object", **options)["ETag"])

        return self._sent(f"cannot write {self.path(key)}", StoreError, send)

    def upload(self, source: Path, key: str, check: Callable[[], None] = lambda: None) -> None:
        """Make a local file an object, or replace one by it; `check` is called before each attempt, and may raise.

        Raises:
            StoreError: it cannot be written.
        """
        bucket, name = self._split(key)
        part_bytes = max(PART_BYTES, source.stat().st_size // (MAX_PARTS - 1) + 1)

        def send() -> None:
            check()
            filesystem().put_file(
                str(source), f"{bucket}/{name}", chunksize=part_bytes, max_concurrency=PARTS_AT_ONCE
            )

        self._sent(f"cannot write {self.path(key)}", StoreError, send)

    def download(self, key: str, target: Path) -> None:
        """Make an object a local file.

        Raises:
            MissingObjectError: there is none.
            ShardError: it cannot be read.
        """
        bucket, name = self._split(key)

        def send() -> None:
            filesystem().get_file(f"{bucket}/{name}", str(target), max_concurrency=PARTS_AT_ONCE)

        self._sent(f"cannot read {self.path(key)}", ShardError, send)

    def address(self, key: str, lifetime_s: float) -> str:
        """An address by which whoever knows it can read an object by HTTP for so many seconds; asks nothing of the server."""
        bucket, name = self._split(key)
        return str(filesystem().url(f"{bucket}/{name}", expires=int(lifetime_s)))

    def keys(self, start: str) -> dict[str, int]:
        """The size in bytes of every object whose key begins with `start`, by key, sorted by it.

        Raises:
            StoreError: they cannot be listed.
        """
        bucket, prefix = self._split(start)
        skipped = len(prefix) - len(start)
        found: dict[str, int] = {}
        token: dict[str, str] = {}
        while True:

            def send(token: dict[str, str] = token) -> Any:
                return filesystem().call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token)

            page = self._sent(f"cannot list {self.path(start)}", StoreError, send)
            found |= {each["Key"][skipped:]: each["Size"] for each in page.get("Contents", [])}
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def remove(self, keys: Sequence[str], check: Callable[[], None] = lambda: None) -> None:
        """Remove objects; those that are not there are no error. `check` is called before each attempt, and may raise.

        Raises:
            StoreError: one could not be removed.
        """
        for first in range(0, len(keys), REMOVED_AT_ONCE):
            some = [self._split(key) for key in keys[first : first + REMOVED_AT_ONCE]]
            what = {"Objects": [{"Key": name} for _, name in some], "Quiet": True}

            def send(bucket: str = some[0][0], what: dict[str, object] = what) -> Any:
                check()
                return filesystem().call_s3("delete_objects", Bucket=bucket, Delete=what)

            answer = self._sent(f"cannot remove {self.path(keys[first])}", StoreError, send)
            for error in answer.get("Errors", []):
                raise StoreError(f"cannot remove s3://{some[0][0]}/{error['Key']}: {error.get('Message')}")

    def _split(self, key: str) -> tuple[str, str]:
        """Bucket, and key within the bucket."""
        bucket, _, name = f"{self.root}/{key}".partition("/")
        return bucket, name

    def _sent(self, failed: str, kind: type[StoreError], send: Callable[[], T]) -> T:
        attempts = self.attempts
        try:
            said = _attempts()
            attempts = attempts or said
            for attempt in retries(
                is_transient, attempts=attempts, backoff_s=BACKOFF_S, longest_s=LONGEST_WAIT_S
            ):
                with attempt:
                    return send()
        except FAILURES as error:
            raise in_words(error, failed, kind, attempts) from error
        raise AssertionError("the last attempt returns or raises")


@functools.cache
def _attempts() -> int:
    """AWS_MAX_ATTEMPTS, or max_attempts of the profile; ValueError unless it is a whole number from 1."""
    said = Session().get_config_variable("max_attempts")
    attempts = DEFAULT_ATTEMPTS if said is None else int(said)
    if attempts < 1:
        raise ValueError(f"{attempts} attempts at a request are none")
    return attempts


def filesystem() -> Any:
    """This process's s3fs instance, which has no cache of listings and leaves sending again to us.

    A forked child gets an instance of its own: connections are never shared with the parent.
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
