"""What requests to S3 fail with: which of it passes, and the rest in words."""

from typing import Any

import aiohttp
from botocore import exceptions as aws

from tasks.errors import ShardGoneError, StoreError

FAILURES = (OSError, ValueError, aws.BotoCoreError, aws.ClientError, aiohttp.ClientError)
"""What a request by way of s3fs raises; ValueError for settings that cannot be understood."""

CREDENTIALS_REMEDY = "give credentials that may: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"

_PASSING = (
    aws.ConnectionError,
    aws.HTTPClientError,
    aws.IncompleteReadError,
    aiohttp.ClientError,
    ConnectionError,
    TimeoutError,
)
_PASSING_STATUS = {408, 425, 429}
_PASSING_CODES = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "OperationAborted"}
_NO_OBJECT = {"NoSuchKey", "404"}
_CHANGED = {"PreconditionFailed", "ConditionalRequestConflict"}


class MissingObjectError(ShardGoneError):
    """There is no object of that key."""


class ObjectChangedError(StoreError):
    """An object is not, or no longer, what a conditional request expected of it."""


def is_transient(error: Exception) -> bool:
    """True when the same request may succeed later: no connection, one that broke, throttling, a server's error."""
    answer = _answer(error)
    if not answer:
        return isinstance(error, _PASSING) or isinstance(error.__cause__, _PASSING)
    status = answer["Status"]
    return bool(status in _PASSING_STATUS or status >= 500 or answer["Code"] in _PASSING_CODES)


def in_words(error: Exception, failed: str, kind: type[StoreError], attempts: int) -> StoreError:
    """An error of this project for one of `FAILURES`.

    Args:
        error: what the last of `attempts` requests raised.
        failed: what could not be done, and where: "cannot read s3://bucket/run.json".
        kind: of the error, where no other fits better.
        attempts: at the request.
    """
    code = _answer(error).get("Code", "")
    reason = str(error.args[-1] if isinstance(error, OSError) and error.args else error).rstrip(".")
    if code in _NO_OBJECT:
        return MissingObjectError(f"{failed}: there is no such object")
    if code in _CHANGED:
        return ObjectChangedError(f"{failed}: another process has written it")
    if is_transient(error):
        remedy = "look at the server, and at AWS_ENDPOINT_URL, which names it"
        return kind(f"{failed}, tried {attempts} times: {type(error).__name__}: {reason}; {remedy}")
    return kind(f"{failed}: {reason}{_remedy(error, code)}")


def _remedy(error: Exception, code: str) -> str:
    if code == "NoSuchBucket":
        return "; make the bucket, or name another in store.root"
    if isinstance(error, PermissionError):
        return f" ({code}); {CREDENTIALS_REMEDY}"
    if isinstance(error, (aws.NoCredentialsError, aws.PartialCredentialsError)):
        return f"; {CREDENTIALS_REMEDY}"
    if isinstance(error, aws.ProfileNotFound):
        return "; AWS_PROFILE names a profile of ~/.aws/config"
    if isinstance(error, ValueError):
        return "; AWS_ENDPOINT_URL begins with http:// or https://, AWS_MAX_ATTEMPTS is a whole number from 1"
    return ""


def _answer(error: BaseException | None) -> dict[str, Any]:
    """Code and Status of the server's answer that an error comes from; empty when there was none."""
    while error is not None:
        if isinstance(error, aws.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return {"Code": error.response.get("Error", {}).get("Code", ""), "Status": status}
        error = error.__cause__
    return {}
