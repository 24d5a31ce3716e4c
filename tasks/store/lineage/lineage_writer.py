"""Write the lineage and the model card of a policy that is exported."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rollmill.tasks.errors import RollmillError, StoreError, error_text
from rollmill.tasks.store.checkpoints.checkpoint_marker import describe_file
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, step_from_key
from rollmill.tasks.store.lineage.policy_lineage import (
    CARD,
    LINEAGE,
    Lineage,
    PromptData,
    RunRecord,
    StartModel,
    StepRecord,
    read_lineage,
)
from rollmill.tasks.store.lineage.teacher_rows import find_teacher, read_teacher
from rollmill.tasks.store.lineage.trained_rows import combine_digests, read_trained_rows
from rollmill.tasks.store.model_folders import is_hub_name
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.manifest import Manifest, read_manifest
from rollmill.tasks.store.stored_batch import batch_digest
from rollmill.tasks.user_code.plug_in import PlugIn

# Settings in the card; lineage.json has all.
_SHOWN = ("seed", "train.loss", "score.advantage", "train.lr", "train.kl.coef", "rollout.group_size")


def write_lineage(policy: Path, run: RunFolder, version: int, model: Path) -> None:
    """Write lineage.json and the model card of a policy of a run, whose other files are complete.

    A step whose rows cannot be read has the reason in its record: a damaged shard does not stop an export.

    Args:
        policy: local folder of the new policy.
        run: the run that trained it.
        version: policy version.
        model: folder of the run's start model.

    Raises:
        StoreError: run.json cannot be read.
        OSError: a file cannot be read or written.
    """
    manifest = read_manifest(run)
    before = _find_earlier(run, manifest.run, version)
    teachers = {step: find_teacher(manifest, step) for step in range(version)}
    known = {
        each.step: each
        for each in (before.steps if before else ())
        if not each.error and bool(each.teacher) == bool(teachers.get(each.step))
    }
    steps = tuple(known.get(step) or record_step(run, step, teachers[step]) for step in range(version))
    paths = {path.relative_to(policy).as_posix(): path for path in sorted(policy.rglob("*"))}
    files = {
        name: describe_file(path)
        for name, path in paths.items()
        if path.is_file() and name not in (LINEAGE, CARD)
    }
    lineage = Lineage(
        run=manifest.run,
        folder=run.absolute,
        version=version,
        run_created_at=manifest.created_at,
        start_model=before.start_model if before else _describe_model(model),
        origins=tuple(
            RunRecord(run=each.run, folder=each.folder, step=each.step) for each in manifest.origins
        ),
        sources=tuple(RunRecord(run=each.run, folder=each.folder) for each in manifest.sources),
        scorers=tuple(sorted({scorer for step in steps for scorer in step.scorers})),
        data=tuple(_list_data(manifest)),
        settings=manifest.config,
        earlier_settings=tuple(
            {"until_step": each.until_step, **each.settings} for each in manifest.earlier_settings
        ),
        versions=manifest.versions,
        git_commit=manifest.git_commit,
        steps=steps,
        files=files,
    )
    (policy / CARD).write_text(format_card(lineage))
    (policy / LINEAGE).write_bytes(lineage.to_bytes())


def record_step(run: RunFolder, step: int, teacher: str = "") -> StepRecord:
    """Read the batch of a step, the rows that it was made of, and a teacher's log-probabilities; compute their digests."""
    try:
        batch = read(run, "batches", step=step)
        rows = read_trained_rows(run, batch)
        taught = read_teacher(run, batch, teacher) if teacher else None
    except (RollmillError, OSError) as error:
        return StepRecord(step=step, error=error_text(error))
    scorers = tuple(sorted({row.scorer for row in rows}))
    return StepRecord(
        step=step,
        n_rows=len(rows),
        batch=batch_digest(batch),
        rows=combine_digests(rows),
        scorers=scorers,
        teacher=taught,
    )


def _find_earlier(run: RunFolder, run_id: str, version: int) -> Lineage | None:
    """Read the lineage of the newest earlier policy of a run: what is recorded there is not read from all steps again."""
    keys = open_files(run).keys(f"policies/version=*/{LINEAGE}")
    earlier = [key for key in keys if (step_from_key(key) or 0) <= version]
    for key in sorted(earlier, reverse=True):
        try:
            found = read_lineage(RunFolder(run.path(key.rpartition("/")[0])))
        except StoreError:
            # A damaged one is no source of anything.
            continue
        if found.run == run_id:
            return found
    return None


def _describe_model(model: Path) -> StartModel:
    """Describe the files of a start model; those of an exported policy are in its lineage.json."""
    # An alias may lead to another policy later.
    folder = str(model.resolve())
    if (model / LINEAGE).is_file():
        try:
            theirs = read_lineage(RunFolder(folder))
        except StoreError:
            pass
        else:
            return StartModel(folder=folder, files=theirs.files, lineage=theirs.digest)
    files = {path.name: describe_file(path) for path in sorted(model.glob("*")) if path.is_file()}
    return StartModel(folder=folder, files={name: each for name, each in files.items() if name != CARD})


def _list_data(manifest: Manifest) -> Iterator[PromptData]:
    """Yield the problems of each environment of a run, by its recorded settings."""
    config = manifest.config
    for entry in config.get("environments") or [{}]:

        def find(name: str, entry: Mapping[str, Any] = entry) -> str:
            found = get_setting(entry, name, get_setting(config, name, ""))
            return str(PlugIn.model_validate(found) if isinstance(found, Mapping) else found or "")

        env = find("rollout.environment")
        # An agent is given the problems of another environment.
        problems = find("rollout.agent.problems") if env == "agent" else env
        is_file = problems == "prompts"
        yield PromptData(
            env=str(entry.get("name") or env),
            source=find("rollout.prompts.path") if is_file else problems,
            license=find("rollout.prompts.license") if is_file else "",
        )


def format_card(lineage: Lineage) -> str:
    """Return README.md of a policy, a model card as Hugging Face reads it: YAML front matter, and a table of what made the policy."""
    model = str(lineage.settings.get("model") or "")
    hub_data = [each.source for each in lineage.data if is_hub_name(each.source)]
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rollmill", "reinforcement-learning"],
    }
    # The hub accepts names of models and data sets there, and no folders.
    front |= {"base_model": model} if is_hub_name(model) else {}
    front |= {"datasets": hub_data} if hub_data else {}
    # A run with further sources may train on its own rollouts too.
    is_retrained = bool(get_setting(lineage.settings, "retrain.sources", ()))
    own = [] if lineage.sources and is_retrained else ["the run itself"]
    n_rows = sum(step.n_rows for step in lineage.steps)
    rows = {
        "run": f"`{lineage.run}`, in `{lineage.folder}`",
        "policy version": str(lineage.version),
        "start model": f"`{model or lineage.start_model.folder}`",
        "trained on": f"{n_rows} trajectories in {len(lineage.steps)} steps",
        "rollouts of": ", ".join([*own, *(f"`{each.folder}`" for each in lineage.sources)]),
        "forked from": ", ".join(f"`{each.folder}` at step {each.step}" for each in lineage.origins),
        "teacher": ", ".join(f"`{each}`" for each in lineage.teachers),
        "scorers": ", ".join(f"`{each}`" for each in lineage.scorers),
        "data": "; ".join(
            f"{each.env}: `{each.source}`, licence {each.license or 'not stated'}" for each in lineage.data
        ),
        "settings": ", ".join(f"`{name}={get_setting(lineage.settings, name, '')}`" for name in _SHOWN),
        "code": ", ".join(f"{name} {each}" for name, each in lineage.versions.items()),
        "commit": f"`{lineage.git_commit}`" if lineage.git_commit else "",
    }
    said = "A language model, post-trained by reinforcement learning with Rollmill."
    if not lineage.steps:
        said = "A language model that a run of Rollmill began with."
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n"
        f"# Version {lineage.version} of {_cell(lineage.folder.rpartition('/')[2])}\n\n"
        f"{said}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"`{LINEAGE}` has all settings, and the digests of every file, batch and trajectory. In this folder,\n"
        "`rollmill lineage .` lists the trajectories and checks all of them.\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
