"""The source runs of the flow retrain: which of their steps are used, and checks before anything starts."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from rollmill.flows.config import RunConfig
from rollmill.flows.recipe import start_model_folder, stored_model_folder
from rollmill.flows.rules import check_correction
from rollmill.flows.run.folder import find_run
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.rollout.config import SamplingConfig
from rollmill.tasks.score.advantages import resolve_advantage
from rollmill.tasks.score.terms import check_scorer, resolve_terms
from rollmill.tasks.store.folders import POLICIES, RunFolder
from rollmill.tasks.store.logprob_rows import teacher_identity
from rollmill.tasks.store.reader import list_policies, list_scorers, list_steps, read
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.resume import list_done_steps


def check_offline(config: RunConfig) -> None:
    """Check the settings of the flow retrain.

    Raises:
        ConfigError: there are no sources, the routed experts to replay are not stored, or held-out trajectories would be
            scored by another scorer than the training scores, without evaluate.scorer naming it.
    """
    if not config.retrain.sources:
        raise ConfigError("retrain.sources", (), "name the runs to train from")
    resolve_advantage(config.score.advantage)
    if config.train.replay_routing:
        _check_routing(config)
    if not config.evaluate.every:
        return
    check_scorer(config.score, config.evaluate.scorer)
    scorer = resolve_terms(config.score)
    key = f"{scorer.name}@{scorer.version}"
    if not config.evaluate.scorer and key != config.retrain.scores:
        remedy = (
            f"held-out trajectories would be scored by {key}: set score.scorer to the scorer of these scores, name "
            "another one in evaluate.scorer, or set evaluate.every=0"
        )
        raise ConfigError("retrain.scores", config.retrain.scores, remedy)


def check_source_sampling(config: RunConfig) -> list[str]:
    """Return the settings, with their values, by which sources sampled from another distribution than the trained one.

    Raises:
        ConfigError: there are some, and no importance weights correct for that.
    """
    altered: set[str] = set()
    for source in map(find_run, config.retrain.sources):
        stored = read_manifest(source).config
        for entry in stored.get("environments") or [{}]:
            # A run that is older than these settings has none.
            sampling: dict[str, object] = {}
            for given in (stored, entry):
                sampling |= given.get("rollout", {}).get("sampling", {})
            altered |= {*SamplingConfig.model_validate(sampling).list_altered()}
    check_correction(config.train, sorted(altered))
    return sorted(altered)


def _check_routing(config: RunConfig) -> None:
    for source, steps in find_source_steps(config):
        if missing := sorted({*steps} - {*list_steps(source, "routing")}):
            remedy = (
                f"{source.location} has no routed experts of step {missing[0]}, nor of {len(missing) - 1} more steps: use "
                "other steps (retrain.where), or set it to false"
            )
            raise ConfigError("train.replay_routing", True, remedy)


def find_source_steps(config: RunConfig) -> list[tuple[RunFolder, dict[int, set[int] | None]]]:
    """Return each source with its finished steps, and of these the groups that meet retrain.where; None: all groups.

    A step is finished when it was trained on; in a run of the flow collect, when all its groups are collected.

    Raises:
        ConfigError: a source is not a run or lacks the scores, retrain.where is no condition, or no group meets it.
    """
    scores, condition = config.retrain.scores, config.retrain.where
    found: list[tuple[RunFolder, dict[int, set[int] | None]]] = []
    done: list[str] = []
    for source in map(find_run, config.retrain.sources):
        if scores not in (there_are := list_scorers(source)):
            remedy = f"give scores that {source.location} has: {', '.join(there_are) or 'none'}; `rollmill rescore` makes others"
            raise ConfigError("retrain.scores", scores, remedy)
        steps = list_done_steps(source, read_manifest(source))
        done.append(f"{source.location} has done {f'steps {steps[0]} to {steps[-1]}' if steps else 'none'}")
        if condition:
            chosen = RunFrames([source], scores).find_groups("retrain.where", condition)
            found.append((source, {step: chosen[step] for step in steps if step in chosen}))
        else:
            found.append((source, dict.fromkeys(steps)))
    if condition and not any(steps for _, steps in found):
        raise ConfigError(
            "retrain.where", condition, f"no group of a finished step meets it: {', '.join(done)}"
        )
    return found


def check_teacher_rows(teacher: str, ids: Mapping[tuple[str, int], Collection[str]]) -> None:
    """Refuse to train on trajectories without a teacher's stored log-probabilities, or with those of two models of its name.

    `ids` are the trajectories by the location of the run that sampled them and their step.

    Raises:
        ConfigError: names the run, the first trajectory and the command that stores them.
    """
    models: set[str] = set()
    for source in dict.fromkeys(source for source, _ in ids):
        folder, missing, total = RunFolder(source), list[str](), 0
        for (_, step), wanted in ((key, each) for key, each in ids.items() if key[0] == source):
            rows = read(folder, "logprobs", ["trajectory_id", "model"], policy=teacher, step=step)
            known = set(rows["trajectory_id"].to_pylist())
            models.update(map(str, rows["model"].to_pylist()))
            missing += [each for each in wanted if each not in known]
            total += len(wanted)
        if missing:
            others = [each for each in list_policies(folder) if each not in POLICIES]
            remedy = (
                f"{len(missing)} of {total} trajectories of {source} have no log-probabilities by it, such as {missing[0]}: "
                f"`rollmill annotate {source} --teacher MODEL --name {teacher}` stores them; it has those of "
                f"{', '.join(others) or 'no teacher'}"
            )
            raise ConfigError("train.kl.teacher", teacher, remedy)
    if len({teacher_identity(each) for each in models}) > 1:
        remedy = f"the sources have log-probabilities of this name by different models: {', '.join(sorted(models))}"
        raise ConfigError("train.kl.teacher", teacher, remedy)


def check_tokenizers(config: RunConfig) -> None:
    """Refuse sources whose vocabulary differs from the start model's; missing models are not compared.

    Raises:
        ConfigError: names the source, and both models.
    """
    ours = start_model_folder(config)
    for source in map(find_run, config.retrain.sources):
        try:
            theirs = stored_model_folder(read_manifest(source).config)
        except ValueError:
            # Settings of another version of Rollmill: the source's model is unknown.
            continue
        vocabularies = [read_vocabulary(folder / "tokenizer.json") for folder in (ours, theirs)]
        # Tokenizers with other pre-tokenization or templates are fine: stored token ids are used as they are.
        if all(vocabularies) and vocabularies[0] != vocabularies[1]:
            remedy = f"its rollouts have tokens of {theirs}, whose vocabulary differs from that of the start model {ours}"
            raise ConfigError("retrain.sources", source.location, remedy)


def read_vocabulary(path: Path) -> list[object]:
    """Return the vocabulary in a tokenizer.json: its model's, and (id, token) of added tokens; [] if the file is missing."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    added = [(each["id"], each["content"]) for each in stored.get("added_tokens", [])]
    return [stored["model"]["vocab"], added]
