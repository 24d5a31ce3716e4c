"""A teacher of stored rollouts: what it is, whether it fits the run, and which trajectories lack its log-probabilities."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmill.flows.checks.preflight import check_architecture, check_rope
from rollmill.flows.configuration.config import AnnotateConfig
from rollmill.flows.configuration.recipe import download_model, stored_model_folder
from rollmill.flows.offline.retrain_sources import read_vocabulary
from rollmill.flows.offline.unscored import find_groups, no_step_error, select_steps
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.score.scoring import select_scorable
from rollmill.tasks.store.checkpoints.checkpoint_marker import describe_file
from rollmill.tasks.store.folders import POLICIES, RunFolder
from rollmill.tasks.store.logprob_rows import teacher_identity
from rollmill.tasks.store.model_folders import model_folder
from rollmill.tasks.store.reader import list_steps, read
from rollmill.tasks.store.rows import column_values, rows_from_table, rows_where_in, rows_without
from rollmill.tasks.store.run.manifest import read_manifest

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
# Weights and what else determines a model's log-probabilities.
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
_COLUMNS = ("group", "trajectory_id", "status", "temperature")
DIGEST_DIGITS = 32


@dataclass(frozen=True, slots=True)
class UnannotatedStep:
    """The chosen trajectories of one step of a run that have no log-probabilities by a teacher.

    Attributes:
        step: their step.
        n_trajectories: chosen trajectories, also those that have some.
        ids: of those that have none.
    """

    step: int
    n_trajectories: int
    ids: tuple[str, ...]


def teacher_name(config: AnnotateConfig) -> str:
    """Return the name under which a teacher's log-probabilities are stored.

    Example: "qwen3-8b" for the teacher models/qwen3-8b, if `config.name` is empty.

    Raises:
        ConfigError: there is no teacher, or its name has other characters or is taken.
    """
    if not config.teacher:
        remedy = "give the teacher's model folder, or its name on the Hugging Face hub"
        raise ConfigError("teacher", config.teacher, remedy)
    name = config.name or Path(config.teacher).name
    if name in POLICIES:
        remedy = f"{' and '.join(POLICIES)} are log-probabilities that training stores; give another name"
        raise ConfigError("name", name, remedy)
    if not _NAME.fullmatch(name):
        raise ConfigError("name", name, "use letters, digits and . _ + -, and begin with a letter or digit")
    return name


def describe_teacher(config: AnnotateConfig) -> str:
    """Return NAME@DIGEST of a teacher's model folder, which is stored with each row; with serve.urls the name that it has there.

    The digest covers config.json and the weights.
    """
    if config.serve.urls:
        return Path(config.teacher).name
    folder = model_folder(config.teacher)
    paths = {path.name: path for pattern in _MODEL_FILES for path in sorted(folder.glob(pattern))}
    files = {name: describe_file(path).model_dump() for name, path in paths.items()}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return f"{folder.resolve().name}@{digest[:DIGEST_DIGITS]}"


def list_unannotated(folder: RunFolder, config: AnnotateConfig) -> list[UnannotatedStep]:
    """List the chosen steps of a run with the trajectories that lack the teacher's log-probabilities.

    Trajectories are those that can have a score; failed and cancelled ones are never trained on.

    Raises:
        ConfigError: there is no such step or group, or a trajectory was sampled at another temperature than 1.
    """
    name, chosen = teacher_name(config), find_groups(folder, config.where) if config.where else None
    found = []
    for step in _list_steps(folder, config):
        rows = select_scorable(rows_from_table(read(folder, "rollouts", _COLUMNS, step=step)))
        if chosen is not None:
            rows = rows_where_in(rows, "group", chosen.get(step, ()))
        _check_temperatures(step, column_values(rows, "trajectory_id"), column_values(rows, "temperature"))
        stored = read(folder, "logprobs", ["trajectory_id"], policy=name, step=step)
        missing = rows_without(rows, "trajectory_id", stored["trajectory_id"].to_pylist())
        ids = tuple(str(each) for each in column_values(missing, "trajectory_id"))
        found.append(UnannotatedStep(step, rows.num_rows, ids))
    return found


def _list_steps(folder: RunFolder, config: AnnotateConfig) -> list[int]:
    if steps := select_steps(list_steps(folder, "rollouts"), config):
        return steps
    raise no_step_error(folder, config)


def _check_temperatures(step: int, ids: Sequence[object], temperatures: Sequence[object]) -> None:
    for trajectory, temperature in zip(ids, temperatures, strict=True):
        if temperature != 1.0:
            remedy = (
                f"trajectory {trajectory} of step {step} was sampled at it, and vLLM gives log-probabilities of known tokens at "
                "temperature 1 alone: choose other steps or groups, or distill on-policy with train.kl.reference=frozen"
            )
            raise ConfigError("rollout.temperature", temperature, remedy)


def is_annotated(folder: RunFolder, config: AnnotateConfig) -> bool:
    """Return True if every chosen trajectory has the teacher's log-probabilities."""
    return not any(step.ids for step in list_unannotated(folder, config))


def check_annotation(folder: RunFolder, config: AnnotateConfig) -> None:
    """Refuse a choice of no step or group, and a teacher whose name is taken or that does not fit the run.

    Neither a rollout nor a weight is read. A teacher on the Hugging Face hub is downloaded first.

    Raises:
        ConfigError: names the setting.
    """
    teacher_name(config)
    _list_steps(folder, config)
    if config.where:
        find_groups(folder, config.where)
    if not config.serve.urls:
        download_model("teacher", config.teacher)
        _check_model(folder, config)


def identify_teacher(folder: RunFolder, config: AnnotateConfig) -> str:
    """Return what `describe_teacher` does; ConfigError if the run has log-probabilities of this name by another model."""
    name, model = teacher_name(config), describe_teacher(config)
    for step in list_steps(folder, "logprobs", policy=name):
        rows = read(folder, "logprobs", ["model"], policy=name, step=step)
        stored = str(rows["model"][0]) if rows.num_rows else ""
        if stored and teacher_identity(stored) != teacher_identity(model):
            remedy = f"{folder.location} has log-probabilities of this name by {stored}, and this teacher is {model}: give another name"
            raise ConfigError("name", name, remedy)
        if stored:
            break
    return model


def _check_model(run: RunFolder, config: AnnotateConfig) -> None:
    """Refuse a teacher's folder without a model, with too few positions, or with another vocabulary than the run's model."""
    folder, longest = model_folder(config.teacher), config.serve.max_model_len
    check_architecture("teacher", folder)
    # vLLM chooses by the length with the token that it samples after a sequence.
    check_rope("teacher", folder, longest + 1)
    if (limit := read_positions(folder)) and limit < longest:
        remedy = (
            f"it has {limit} positions, and sequences of the run may have serve.max_model_len = {longest} tokens: if they are "
            f"shorter, set serve.max_model_len={limit}; otherwise give another teacher"
        )
        raise ConfigError("teacher", config.teacher, remedy)
    try:
        ours = stored_model_folder(read_manifest(run).config)
    except ValueError:
        # Settings of another version of Rollmill: the run's model is unknown.
        return
    vocabularies = [read_vocabulary(each / "tokenizer.json") for each in (ours, folder)]
    if not all(vocabularies):
        missing = next(each for each, known in zip((ours, folder), vocabularies, strict=True) if not known)
        remedy = f"its tokenizer cannot be compared with the run's: there is no {missing / 'tokenizer.json'}"
        raise ConfigError("teacher", config.teacher, remedy)
    if vocabularies[0] != vocabularies[1]:
        remedy = (
            f"its vocabulary differs from that of {ours}, whose tokens the rollouts of {run.location} have; a teacher needs the "
            "same tokenizer"
        )
        raise ConfigError("teacher", config.teacher, remedy)


def read_positions(folder: Path) -> int:
    """Return the largest number of tokens of a sequence of a model, by its config.json; 0 if that does not say."""
    settings = json.loads((folder / "config.json").read_text())
    found = (settings | (settings.get("text_config") or {})).get("max_position_embeddings")
    return found if isinstance(found, int) else 0
