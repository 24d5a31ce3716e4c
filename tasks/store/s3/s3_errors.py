"""Errors of requests to S3: which are transient, and messages with a remedy for the rest."""

from typing import Any

import aiohttp
from botocore import exceptions as aws

from rollmill.tasks.errors import ShardGoneError, StoreError

# Errors that a request through s3fs raises; ValueError for invalid settings.
FAILURES = (OSError, ValueError, aws.BotoCoreError, aws.ClientError, aiohttp.ClientError)

CREDENTIALS_REMEDY = "give credentials that may: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"

_TRANSIENT = (
    aws.ConnectionError,
    aws.HTTPClientError,
    aws.IncompleteReadError,
    aiohttp.ClientError,
    ConnectionError,
    TimeoutError,
)
_TRANSIENT_STATUS = {408, 425, 429}
_TRANSIENT_CODES = {
    *("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "OperationAborted"),
    # Of a multipart upload whose completion was answered too late: it is there, or the server has dropped it.
    "NoSuchUpload",
}
_NO_OBJECT = {"NoSuchKey", "404"}
_CHANGED = {"PreconditionFailed", "ConditionalRequestConflict"}


class MissingObjectError(ShardGoneError):
    """The S3 object that a request named does not exist."""


class ObjectChangedError(StoreError):
    """An object has another etag than a conditional request expected, or exists although it should not."""


def is_transient(error: Exception) -> bool:
    """Return True if the same request may succeed later: no or a broken connection, throttling, a server error."""
    answer = _server_answer(error)
    if not answer:
        return isinstance(error, _TRANSIENT) or isinstance(error.__cause__, _TRANSIENT)
    status = answer["Status"]
    return bool(status in _TRANSIENT_STATUS or status >= 500 or answer["Code"] in _TRANSIENT_CODES)


def explain_error(error: Exception, failed: str, kind: type[StoreError], attempts: int) -> StoreError:
    """Translate the error of the last of `attempts` S3 requests, one of `FAILURES`, into a StoreError that names the remedy.

    `failed` is the operation and its place, such as "cannot read s3://bucket/run.json"; `kind` is the class of the returned error,
    unless a more specific one fits.
    """
    code = _server_answer(error).get("Code", "")
    reason = str(error.args[-1] if isinstance(error, OSError) and error.args else error).rstrip(".")
    if code in _NO_OBJECT:
        return MissingObjectError(f"{failed}: there is no such object")
    if code in _CHANGED:
        return ObjectChangedError(f"{failed}: another process has written it")
    if is_transient(error):
        remedy = "check the server and AWS_ENDPOINT_URL, which names it"
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


def _server_answer(error: BaseException | None) -> dict[str, Any]:
    """Extract Code and Status of the S3 server's response from an error or its causes; empty if there was none."""
    # s3fs raises OSErrors, whose cause is the error of botocore.
    while error is not None:
        if isinstance(error, aws.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return {"Code": error.response.get("Error", {}).get("Code", ""), "Status": status}
        error = error.__cause__
    return {}
