"""Every error Rollmill raises on purpose.

RollmillError
├── ConfigError                 a setting is wrong: names field, value and remedy
├── StoreError
│   ├── ManifestError           a run's run.json is damaged
│   ├── SchemaError             rows do not have the data set's schema
│   ├── ShardError              a shard cannot be read, or lacks rows it should have
│   │   └── ShardGoneError      ... since it is not there: removed, or superseded by a compacted one and then removed
│   ├── RunLockedError          another process writes to this run
│   ├── LeaseLostError          ... and has taken it over from this one
│   ├── DiskSpaceError          the next step would not fit on the disk
│   ├── RunMismatchError        a resumed run's fixed settings differ from its run.json
│   └── RunFinishedError        every step of this run is done
├── ServiceError
│   ├── ServiceStartError       a service did not become healthy: its last log lines
│   └── ServiceDiedError        a service ended or stopped answering: its last log lines
├── CollectorGoneError          a collector ended, or gave no sign of life: its groups go to others
├── RequestError                a request to a service failed for good
│   └── TransientRequestError   ... and may succeed when sent again
│       └── ConnectionLostError ... there was no connection, or it broke
├── SyncError                   weights did not arrive
│   ├── RequestsHeldError       a server failed while they were put in place: only a new start helps
│   ├── ChecksumError           weights arrived otherwise than they were sent
│   └── ParityError             weights arrived and give other log-probabilities
├── RolloutError
│   ├── EpisodeError            the environment failed; the trajectory is a failed row
│   │   ├── ToolError           a tool of the environment raised
│   │   ├── EpisodeTimeoutError an environment in a worker process did not answer in time
│   │   ├── EnvironmentDiedError its worker process ended, or was ended since it answered nobody
│   │   └── ForeignError        its own error, raised in a worker process
│   └── FailedShareError        more trajectories failed in a step than the configuration allows
├── ScoreError                  a scorer failed; the score is a failed row
│   ├── FailedScoresError       more scores failed than rescoring allows
│   ├── ScoreTimeoutError       it took longer than score.timeout_s
│   ├── ScoreWorkerError        its worker process ended during the call
│   ├── VerdictError            it gave something that is no verdict, or no finite reward
│   └── JudgeUnparsableError    a judge's answer is not in the form it was asked for
└── TrainError
    ├── BatchRefusedError       the trainer stands at another step or holds another digest
    ├── ReplayError             stored batches did not give the stored checkpoint again
    └── SkippedStepsError       too many steps in a row made no update

All of them are picklable: their arguments are what they print. `printable` and `text_of` make text of errors that
foreign code raised.
"""

import re

MAX_ERROR_CHARACTERS = 2000
MAX_NAMED_TENSORS = 8
_CREDENTIALS = re.compile(
    r"""://(?:
        [^/\s@]+                      # me:secret, or a token alone
        | [^/\s@:]*:(?!\d+[/\s])[^\s@]+  # me:se/cret, which no port and path is
    )@""",
    re.VERBOSE,
)


class RollmillError(Exception):
    """Base of every error that Rollmill raises on purpose."""


class ConfigError(RollmillError):
    """A setting is wrong; nothing has been started."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.remedy}"


class StoreError(RollmillError):
    """Base of the errors of the data sets."""


class ManifestError(StoreError):
    """A run's run.json is damaged."""


class SchemaError(StoreError):
    """Rows do not have the schema of their data set."""


class ShardError(StoreError):
    """A shard cannot be read, or lacks rows that it should have."""


class ShardGoneError(ShardError):
    """A shard is not there; a compacted one may have taken its place since it was listed."""


class RunLockedError(StoreError):
    """Another process holds the run's lock."""


class LeaseLostError(StoreError):
    """This process no longer holds the run that it writes to."""


class DiskSpaceError(StoreError):
    """A disk has less room than the next step is expected to need; nothing of it was begun."""


class RunMismatchError(StoreError):
    """A resumed run was given settings that may not change on resume."""


class RunFinishedError(StoreError):
    """Every step of this run is done."""


class ServiceError(RollmillError):
    """Base of the errors of the processes that the flows talk to."""

    def __init__(self, service: str, reason: str, log_tail: str = "") -> None:
        super().__init__(service, reason, log_tail)
        self.service, self.reason, self.log_tail = service, reason, log_tail

    def __str__(self) -> str:
        text = f"{self.service}: {self.reason}"
        return f"{text}\nits last log lines:\n{self.log_tail}" if self.log_tail else text


class ServiceStartError(ServiceError):
    """A service did not become healthy in time, or ended while starting."""


class ServiceDiedError(ServiceError):
    """A service ended or stopped answering during the run."""


class CollectorGoneError(RollmillError):
    """A collector ended, or gave no sign of life; what it had not finished goes to others."""

    def __init__(self, collector: str, reason: str) -> None:
        super().__init__(collector, reason)
        self.collector, self.reason = collector, reason

    def __str__(self) -> str:
        return f"{self.collector} is gone: {self.reason}"


class RequestError(RollmillError):
    """A request to a service failed, and would fail again."""


class TransientRequestError(RequestError):
    """A request to a service failed, and may succeed when sent again."""


class ConnectionLostError(TransientRequestError):
    """No connection to a service could be opened, or it broke before the answer was there."""


class SyncError(RollmillError):
    """New weights did not arrive at a server."""


class ChecksumError(SyncError):
    """Tensors that arrived at a server are not those that the trainer sent."""

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
    """A server failed while new weights were put in place: its requests stay held until it is started again."""


class ParityError(SyncError):
    """A server's log-probabilities differ from the trainer's after a sync."""

    def __init__(self, server: str, version: str, difference: float, threshold: float) -> None:
        super().__init__(server, version, difference, threshold)
        self.server, self.version = server, version
        self.difference, self.threshold = difference, threshold

    def __str__(self) -> str:
        return (
            f"server {self.server} at version {self.version}: its log-probabilities differ from the "
            f"trainer's by {self.difference:.3g} nats, allowed are {self.threshold:.3g}"
        )


class RolloutError(RollmillError):
    """Base of the errors of sampling."""


class EpisodeError(RolloutError):
    """An environment failed; the trajectory is kept as a failed row."""


class ToolError(EpisodeError):
    """A tool that the policy called raised."""


class EpisodeTimeoutError(EpisodeError):
    """An environment in a worker process did not answer within `rollout.env_timeout_s`."""


class EnvironmentDiedError(EpisodeError):
    """The worker process that played the episode ended, or was ended since it answered nobody."""


class ForeignError(EpisodeError):
    """What an environment raised in its worker process; `kind` is the name of its type there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


class FailedShareError(RolloutError):
    """More trajectories of a step failed than `rollout.max_failed_share` allows."""


class ScoreError(RollmillError):
    """A scorer failed; the score is kept as a failed row."""


class FailedScoresError(ScoreError):
    """More scores of a run failed than rescoring allows."""


class ScoreTimeoutError(ScoreError):
    """A scorer took longer than `score.timeout_s`."""


class ScoreWorkerError(ScoreError):
    """The worker process of a scorer ended during the call, by a crash for example."""


class VerdictError(ScoreError):
    """A scorer gave something that is no verdict, or a reward that is no finite number."""


class JudgeUnparsableError(ScoreError):
    """A judge's answer is not in the form that it was asked for."""


class TrainError(RollmillError):
    """Base of the errors of training."""


class BatchRefusedError(TrainError):
    """The trainer stands at another step, or has applied another batch there."""


class ReplayError(TrainError):
    """Stored batches, applied to a stored checkpoint, did not give the next stored one byte for byte."""


class SkippedStepsError(TrainError):
    """More than `train.max_skipped_steps` steps in a row made no update."""


def printable(text: str) -> str:
    """Text that can be stored and sent: of bounded length, without what is no character (lone surrogates), and masked."""
    text = masked(text[: 2 * MAX_ERROR_CHARACTERS])
    return text[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()


def masked(text: str) -> str:
    """Text whose addresses have no user name and password. Example: of http://me:secret@host it makes http://***@host."""
    return _CREDENTIALS.sub("://***@", text)


def text_of(error: BaseException) -> str:
    """What an error says, printable whatever it is; foreign errors may raise when they are asked.

    Example: an error whose `__str__` raises KeyError says "its text raised KeyError".
    """
    try:
        return printable(str(error))
    except Exception as unprintable:  # noqa: BLE001 - foreign code: even its text may raise
        return f"its text raised {type(unprintable).__name__}"
