"""Every error Rollmill raises on purpose.

RollmillError
├── ConfigError, LibraryError, GateError
├── StoreError: ManifestError, SchemaError, ShardError (ShardGoneError), RunLockedError, LeaseLostError, DiskSpaceError,
│               RunMismatchError, RunFinishedError
├── ServiceError: ServiceStartError, ServiceDiedError
├── RequestError: NothingLoadedError, TransientRequestError (ConnectionLostError)
├── SyncError: RequestsHeldError, ChecksumError, ParityError
├── RolloutError: EpisodeError (ToolError, EpisodeTimeoutError), FailedShareError
├── ScoreError: FailedScoresError, ScoreTimeoutError, VerdictError, JudgeUnparsableError
├── SandboxError
├── WorkerError: WorkerDiedError, WorkerTimeoutError, ForeignError
└── TrainError: BatchRefusedError, ReplayError, SkippedStepsError

All of them are picklable. `printable` and `error_text` turn errors of user code into text that can be stored.
"""

import os
import re
import sysconfig
from pathlib import Path
from reprlib import Repr
from traceback import walk_tb

# Errors are columns of rows: a scorer whose message has a whole conversation must not fill the data set.
MAX_ERROR_CHARACTERS = 2000
MAX_NAMED_TENSORS = 8
# Folders of code that is not the user's.
_INSTALLED = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
# A wrong value may be a whole file, or YAML whose aliases repeat a list a million times.
MAX_VALUE_CHARACTERS = 200
_VALUES = Repr()
_VALUES.maxlevel, _VALUES.maxdict, _VALUES.maxlist, _VALUES.maxtuple = 3, 20, 20, 20
_VALUES.maxstring = _VALUES.maxother = _VALUES.maxlong = MAX_VALUE_CHARACTERS
_CREDENTIALS = re.compile(
    r"""://(?:
        [^/\s@]+                      # me:secret, or a token
        | [^/\s@:]*:(?!\d+[/\s])[^\s@]+  # me:se/cret, but not host:port/path
    )@""",
    re.VERBOSE,
)


class RollmillError(Exception):
    """Base of every error that Rollmill raises on purpose."""


class ConfigError(RollmillError):
    """A setting or an argument is wrong; the text has its name, its value, and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        # All arguments are passed on: an error that crosses a process is pickled by its `args`.
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def __str__(self) -> str:
        return f"{self.field} = {show_value(self.value)}: {self.remedy}"


class LibraryError(RollmillError):
    """An installed library lacks something that Rollmill uses; its version may not be the one Rollmill was written for.

    Args:
        library: its name.
        version: the installed one.
        known: the version that Rollmill was written for.
        missing: what the installed version has not.
    """

    def __init__(self, library: str, version: str, known: str, missing: str) -> None:
        super().__init__(library, version, known, missing)
        self.library, self.version, self.known, self.missing = library, version, known, missing

    def __str__(self) -> str:
        return f"{self.library} {self.version} has no {self.missing}, which Rollmill uses: install {self.library} {self.known}"


class GateError(RollmillError):
    """A policy is not promoted: its gate blocks it, or it was not compared with the policy that is in production now."""


class StoreError(RollmillError):
    """Base of the errors of reading and writing a run's data sets."""


class ManifestError(StoreError):
    """A run's manifest, the file run.json, is damaged."""


class SchemaError(StoreError):
    """Rows do not have the schema of their data set."""


class ShardError(StoreError):
    """A shard cannot be read, or lacks rows that it should have."""


class ShardGoneError(ShardError):
    """A shard no longer exists; compaction may have replaced it since it was listed."""


class RunLockedError(StoreError):
    """Another process holds the run's lock."""


class LeaseLostError(StoreError):
    """This process may not write to a run any more: it lost the run's lease on S3, or a newer trainer has loaded the run."""


class DiskSpaceError(StoreError):
    """A disk has less free space than the next step is expected to need; it is raised before the step is collected or trained."""


class RunMismatchError(StoreError):
    """A run was resumed with other values of settings that cannot change on resume."""


class RunFinishedError(StoreError):
    """A run cannot be resumed, since all its steps are done."""


class ServiceError(RollmillError):
    """Base of the errors of services, such as a vLLM server, the trainer or an environment's worker.

    Attributes:
        service: name of the service.
        reason: what happened.
        log_tail: last lines of its log; empty if it has none here.
    """

    def __init__(self, service: str, reason: str, log_tail: str = "") -> None:
        super().__init__(service, reason, log_tail)
        self.service, self.reason, self.log_tail = service, reason, log_tail

    def __str__(self) -> str:
        text = f"{self.service}: {self.reason}"
        return f"{text}\nlast log lines:\n{self.log_tail}" if self.log_tail else text


class ServiceStartError(ServiceError):
    """A service did not become healthy in time, or ended while starting."""


class ServiceDiedError(ServiceError):
    """A service ended or stopped answering during the run."""


class RequestError(RollmillError):
    """A request to a service failed, and would fail again."""


class NothingLoadedError(RequestError):
    """A trainer refuses a command, since it has loaded no policy; one that had is another process now."""


class TransientRequestError(RequestError):
    """A request to a service failed, and may succeed when sent again."""


class ConnectionLostError(TransientRequestError):
    """No connection to a service could be opened, or it broke before the response arrived."""


class SyncError(RollmillError):
    """Weights could not be sent to, received by or verified on a server; base of the more specific errors of a sync."""


class ChecksumError(SyncError):
    """Tensors that a server received differ from those that the trainer sent."""

    def __init__(self, server: str, version: str, tensors: tuple[str, ...]) -> None:
        super().__init__(server, version, tensors)
        self.server, self.version, self.tensors = server, version, tensors

    def __str__(self) -> str:
        n_more = len(self.tensors) - MAX_NAMED_TENSORS
        more = f", and {n_more} more" if n_more > 0 else ""
        return (
            f"server {self.server} at version {self.version}: {len(self.tensors)} tensors differ from the trainer's: "
            f"{', '.join(self.tensors[:MAX_NAMED_TENSORS])}{more}"
        )


class RequestsHeldError(SyncError):
    """A server failed while it loaded new weights; it answers no requests until it is restarted."""


class ParityError(SyncError):
    """A server's log-probabilities are not those of the trainer's weights after a sync, and its weights cannot be compared."""

    def __init__(self, server: str, version: str, alarm: str) -> None:
        super().__init__(server, version, alarm)
        self.server, self.version, self.alarm = server, version, alarm

    def __str__(self) -> str:
        return f"server {self.server} at version {self.version}: {self.alarm}"


class RolloutError(RollmillError):
    """Base of the errors of sampling trajectories."""


class EpisodeError(RolloutError):
    """An environment failed; the trajectory is stored as a failed row."""


class LongPromptError(EpisodeError):
    """A prompt has more tokens than `rollout.max_prompt_tokens` or `serve.max_model_len` allows."""


class ToolError(EpisodeError):
    """A tool that the policy called raised an exception."""


class EpisodeTimeoutError(EpisodeError):
    """An environment did not answer in time, for example within `rollout.env_timeout_s`."""


class FailedShareError(RolloutError):
    """A larger share of a step's trajectories failed than `rollout.max_failed_share` allows."""


class ScoreError(RollmillError):
    """A scorer failed; the score is stored as a failed row."""


class FailedScoresError(ScoreError):
    """A larger share of a run's scores failed than `max_failed_share` allows when it is rescored."""


class ScoreTimeoutError(ScoreError):
    """A scorer took longer than `score.timeout_s`."""


class VerdictError(ScoreError):
    """A scorer returned something other than the expected verdicts, for example a reward that is not finite."""


class JudgeUnparsableError(ScoreError):
    """A judge model's answer does not have the requested form."""


class SandboxError(RollmillError):
    """A sandbox cannot be started, or ended before its command did."""


class WorkerError(RollmillError):
    """A worker process of user code (an environment, a scorer or a sink) cannot answer a request."""


class WorkerDiedError(WorkerError):
    """A worker process of user code ended, or was killed, before it answered."""


class WorkerKilledError(WorkerDiedError):
    """SIGKILL ended a worker process, as the kernel does when memory is short; user code that crashes ends by other signals."""


class WorkerTimeoutError(WorkerError):
    """A worker process of user code did not answer in time."""


class ForeignError(WorkerError):
    """User code, such as an environment, raised an error; `kind` is the name of its type, `text` its message.

    Example: str(ForeignError("ValueError", "no such tool")) is "ValueError: no such tool".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class TrainError(RollmillError):
    """Base of the errors of training."""


class BatchRefusedError(TrainError):
    """The trainer refuses a batch: it is malformed, differs from the stored one, or belongs to another step."""


class ReplayError(TrainError):
    """Stored batches, applied again to a stored checkpoint, gave other weights, optimizer state or metrics than the run."""


class SkippedStepsError(TrainError):
    """More than `train.max_skipped_steps` steps in a row made no update of the weights."""


def printable(text: str) -> str:
    """Make text safe to store and send: cut to MAX_ERROR_CHARACTERS, credentials masked, lone surrogates replaced."""
    # Masked before it is cut: half of an address may no longer look like one.
    text = mask_credentials(text[: 2 * MAX_ERROR_CHARACTERS])
    return text[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()


def show_value(value: object) -> str:
    """Return a value as Python writes it, cut to about MAX_VALUE_CHARACTERS."""
    shown = _VALUES.repr(value)
    return shown if len(shown) <= MAX_VALUE_CHARACTERS else f"{shown[:MAX_VALUE_CHARACTERS]}..."


def mask_credentials(text: str) -> str:
    """Mask user names and passwords in addresses. Example: http://me:secret@host becomes http://***@host."""
    return _CREDENTIALS.sub("://***@", text)


def error_text(error: BaseException) -> str:
    """Return an error's message, made safe to store by `printable`; errors raised by its `__str__` are caught.

    Example: an error whose `__str__` raises KeyError says "its text raised KeyError".
    """
    try:
        return printable(str(error))
    except Exception as unprintable:  # noqa: BLE001 - user code: even its text may raise
        return f"its text raised {type(unprintable).__name__}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name of an error's type and its message as `user_error_text` gives it, both safe to store in a row."""
    if isinstance(error, ForeignError):
        return printable(error.kind), printable(error.text)
    return printable(type(error).__name__), user_error_text(error)


def user_error_text(error: BaseException) -> str:
    """Return an error's message as `error_text` does, and where in user code it was raised.

    Example: "division by zero (rewards.py:12, in exact)". Rollmill's own errors have no place, nor has an error without a
    frame of user code, which is any file that is neither Rollmill's nor installed with Python or with a package.
    """
    text, place = error_text(error), "" if isinstance(error, RollmillError) else _find_user_frame(error)
    return f"{text[: MAX_ERROR_CHARACTERS - len(place)]}{place}"


def _find_user_frame(error: BaseException) -> str:
    """Return the innermost frame of user code in parentheses; empty without one."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(("<", *_INSTALLED)):
            found = frame.f_code, line
    if found is None:
        return ""
    code, line = found
    here = f"{Path.cwd()}{os.sep}"
    return f" ({code.co_filename.removeprefix(here)}:{line}, in {code.co_name})"
