"""lineage.json of an exported policy: what made its weights, from its files to the rows that it was trained on."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmill.tasks.config import describe_invalid
from rollmill.tasks.errors import StoreError
from rollmill.tasks.store.checkpoints.checkpoint_marker import StoredFile
from rollmill.tasks.store.filesystem import open_files, read_text
from rollmill.tasks.store.folders import RunFolder

LINEAGE = "lineage.json"
CARD = "README.md"
# Name of the hash of the other content, SHA-256 of its JSON with sorted names; it identifies the policy.
_HASH = "content_sha256"


class _LineageModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="constants")


class TeacherRecord(_LineageModel):
    """A teacher whose stored log-probabilities a step was trained on.

    Attributes:
        name: under which they are stored.
        models: NAME@DIGEST of the model that computed them, the digest of its weights; several if its folder was renamed.
        logprobs: SHA-256 over those of each trajectory of the batch; see `read_teacher`.
    """

    name: str
    models: tuple[str, ...]
    logprobs: str


class StepRecord(_LineageModel):
    """What a step was trained on.

    Attributes:
        n_rows: trajectories in its batch.
        batch: digest of the batch; see `batch_digest`.
        rows: SHA-256 over rollout and score of each trajectory; see `combine_digests`.
        scorers: NAME@VERSION of the scorers of their rewards.
        error: why batch or rows could not be read when the policy was exported; empty if they could.
        teacher: None without a teacher whose log-probabilities are stored; then lineage.json has no such field.
    """

    step: int
    n_rows: int = 0
    batch: str = ""
    rows: str = ""
    scorers: tuple[str, ...] = ()
    error: str = ""
    teacher: TeacherRecord | None = Field(None, exclude_if=lambda value: value is None)


class RunRecord(_LineageModel):
    """A run whose rows a policy was trained on: id, absolute folder, and for one that was forked the step of the fork."""

    run: str
    folder: str
    step: int | None = None


class StartModel(_LineageModel):
    """The model that training began with: absolute folder, its files, and the hash of its lineage.json if it has one."""

    folder: str
    files: dict[str, StoredFile]
    lineage: str = ""


class PromptData(_LineageModel):
    """The problems of one environment: where they are from, and under which licence; either is empty if not known."""

    env: str
    source: str
    license: str


class Lineage(_LineageModel):
    """Content of lineage.json.

    Attributes:
        format: number of the format.
        run, folder: id and absolute folder of the run that trained the policy.
        version: policy version; batches of steps 0 to version - 1 are applied.
        run_created_at: ISO 8601, UTC.
        start_model: what training began with.
        origins: runs that the run was forked from, oldest first.
        sources: runs whose stored rollouts the run trained on.
        scorers: NAME@VERSION of every scorer whose rewards were trained on.
        data: problems by environment.
        settings: of the run; `earlier_settings`: those of earlier steps that changed.
        versions: of the packages that the run used; `git_commit`: of the checkout, if it used one.
        steps: one record for each step.
        files: the other files of the policy, but README.md, by path.
    """

    format: int = 1
    run: str
    folder: str
    version: int
    run_created_at: str
    start_model: StartModel
    origins: tuple[RunRecord, ...] = ()
    sources: tuple[RunRecord, ...] = ()
    scorers: tuple[str, ...] = ()
    data: tuple[PromptData, ...] = ()
    settings: dict[str, Any]
    earlier_settings: tuple[dict[str, Any], ...] = ()
    versions: dict[str, str]
    git_commit: str
    steps: tuple[StepRecord, ...]
    files: dict[str, StoredFile]

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers of its steps as "NAME (MODEL)", in the order in which they taught."""
        taught = (step.teacher for step in self.steps)
        return tuple(dict.fromkeys(f"{each.name} ({', '.join(each.models)})" for each in taught if each))

    @property
    def digest(self) -> str:
        """SHA-256 that identifies the policy, 64 hex digits; it covers the hashes of all files and rows."""
        return _hash_content(json.loads(self.model_dump_json()))

    def to_bytes(self) -> bytes:
        """Encode the record as JSON text with the hash of its content."""
        content: dict[str, Any] = json.loads(self.model_dump_json())
        return json.dumps(content | {_HASH: _hash_content(content)}, indent=1).encode() + b"\n"


def _hash_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_lineage(text: bytes, where: str) -> Lineage:
    """Parse lineage.json; StoreError, which names the file `where`, if any byte is not what was written."""
    try:
        lineage = Lineage.model_validate_json(text)
    except ValidationError as error:
        raise StoreError(f"{where} is damaged: {describe_invalid(error)}") from error
    # The hash of the content is in the text, so a changed byte makes another text, also one between two values.
    if lineage.to_bytes() != text:
        raise StoreError(f"{where} is damaged: its content is not what was written")
    return lineage


def read_lineage(policy: RunFolder) -> Lineage:
    """Read lineage.json of the folder of an exported policy.

    Raises:
        ShardError: it is missing or cannot be read.
        StoreError: it is damaged.
    """
    return parse_lineage(read_text(open_files(policy), LINEAGE), policy.path(LINEAGE))
