"""The stored decision whether a policy may replace another one in production."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import RunFolder

# Hex digits of a policy's digest in the name of a record.
_DIGITS = 16


class _GateModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GatedPolicy(_GateModel):
    """A policy that was compared: its folder, digest, run and version, and its evaluation.

    Attributes:
        evaluated_in: folder of the run that has the evaluation, as version `evaluated_version`.
        rows: SHA-256 of the evaluation's rows.
    """

    location: str
    digest: str
    run: str
    version: int
    evaluated_in: str
    evaluated_version: int
    rows: str


class GateCheck(_GateModel):
    """One comparison of two policies on the same held-out prompts; see `compare_pairs`.

    Attributes:
        env: environment, or all.
        answers: sampled or greedy.
        n: prompts.
        candidate, production: mean rewards; `production` is None if there is no other policy.
        difference: candidate minus production; `low` is its lower bound at the gate's error rate.
        pass_rate: probability that an equal policy passes this check.
    """

    env: str
    answers: str
    n: int
    candidate: float
    production: float | None = None
    difference: float | None = None
    low: float | None = None
    pass_rate: float | None = None
    passed: bool = True


class GateRecord(_GateModel):
    """The decision, and all that it was made from.

    Attributes:
        reasons: why the candidate is blocked; empty if it passed.
        error_rate: probability, at most, that a policy passes whose reward is lower by `margin` or more in any check.
        min_reward: smallest mean reward of the sampled answers that passes; None: any.
        against: the policy that it was compared with; None: there was none.
    """

    format: int = 1
    created_at: str
    candidate: GatedPolicy
    against: GatedPolicy | None
    margin: float
    error_rate: float
    min_reward: float | None
    checks: tuple[GateCheck, ...]
    reasons: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if the candidate may be promoted in place of `against`."""
        return not self.reasons


def gate_key(candidate: str, against: str) -> str:
    """Return the key of the record about two policies below a folder of aliases, given their digests; `against` may be empty."""
    return f"gates/{candidate[:_DIGITS]}-{against[:_DIGITS] or 'none'}.json"


def write_gate(root: RunFolder, record: GateRecord) -> str:
    """Store a record, in place of an earlier one about the same two policies; returns its path, raises StoreError."""
    key = gate_key(record.candidate.digest, record.against.digest if record.against else "")
    publish_text(open_files(root), key, record.model_dump_json(indent=1).encode() + b"\n")
    return root.path(key)


def read_gate(root: RunFolder, candidate: str, against: str) -> GateRecord | None:
    """Read the record about two policies, given their digests; None if there is none. Raises StoreError if it is damaged."""
    key, files = gate_key(candidate, against), open_files(root)
    if not files.keys(key):
        return None
    try:
        record = GateRecord.model_validate_json(read_text(files, key))
    except ValidationError as error:
        raise StoreError(
            f"{root.path(key)} is damaged: {error.errors()[0]['msg']}; gate the policy again"
        ) from error
    found: Sequence[str] = (record.candidate.digest, record.against.digest if record.against else "")
    return record if found == (candidate, against) else None
