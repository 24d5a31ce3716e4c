"""The runs whose stored rollouts another run trains on: which of their steps are used, and checks before anything starts."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs
from rollmill.flows.configuration.recipe import start_model_folder, stored_model_folder
from rollmill.flows.configuration.rules import check_correction
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.stored_groups import read_stored_groups
from rollmill.tasks.rollout.config import SamplingConfig
from rollmill.tasks.score.advantages import resolve_advantage
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.scoring import combined_key
from rollmill.tasks.score.terms import check_scorer, resolve_terms
from rollmill.tasks.store.folders import POLICIES, RunFolder
from rollmill.tasks.store.logprob_rows import teacher_identity
from rollmill.tasks.store.reader import list_policies, list_scorers, list_steps, read
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.manifest import TrainingSource, check_sources, read_manifest, read_sources
from rollmill.tasks.store.run.resume import list_done_steps
from rollmill.tasks.store.run.run_search import find_run

_TEMPERATURE = "rollout.temperature"


def scorer_key(config: ScoreConfig) -> str:
    """Return NAME@VERSION of the scorer that the settings name."""
    scorer = resolve_terms(config)
    return f"{scorer.name}@{scorer.version}"


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
    key = scorer_key(config.score)
    if not config.evaluate.scorer and key != config.retrain.scores:
        remedy = (
            f"held-out trajectories would be scored by {key}: set score.scorer to the scorer of these scores, name "
            "another one in evaluate.scorer, or set evaluate.every=0"
        )
        raise ConfigError("retrain.scores", config.retrain.scores, remedy)


def check_replay_sources(folder: RunFolder, config: RunConfig) -> tuple[TrainingSource, ...]:
    """Check the runs of rollout.replay.sources, and return their ids and folders; none with rollout.replay.share 0.

    `folder` is that of the run that trains on them.

    Raises:
        ConfigError: a source is no run, is another one than when the run began, has no scores by the run's scorer, has no step whose
            sampler's log-probabilities are known, or sampled from another distribution than the trained one without a correction.
    """
    field, given = "rollout.replay.sources", config.rollout.replay.sources
    if not (given and config.rollout.replay.share):
        return ()
    check_sources(folder, field)
    keys = {name: scorer_key(each.score) for name, each in environment_configs(config).items()}
    scorer, sources = combined_key(keys), []
    for each in given:
        try:
            sources.append(source := find_run(each))
        except ConfigError as error:
            raise ConfigError(field, each, error.remedy) from error
        if source.absolute == folder.absolute:
            raise ConfigError(field, each, "a run draws from its own earlier steps anyway: leave it out")
        if scorer not in (there_are := list_scorers(source)):
            remedy = (
                f"its groups need scores by the run's scorer, {scorer}, and it has those of {', '.join(there_are) or 'none'}: "
                "`rollmill rescore` makes others"
            )
            raise ConfigError(field, each, remedy)
        steps = list_done_steps(source, read_manifest(source))
        if steps and not any(len(read_stored_groups(source, scorer, step)) for step in steps):
            remedy = (
                "its trajectories were imported, without the log-probabilities of their sampler, for which nothing could correct: "
                "`rollmill retrain` with train.old_logprobs=trainer trains on them"
            )
            raise ConfigError(field, each, remedy)
    check_source_sampling(config, given)
    return read_sources(sources)


def check_source_sampling(config: RunConfig, sources: Sequence[str]) -> list[str]:
    """Return the settings, with their values, by which sources sampled from another distribution than the trained one.

    Raises:
        ConfigError: there are some, and no importance weights correct for that; or a source sampled at a temperature that a
            reference deployment cannot compute at.
    """
    altered: set[str] = set()
    for source in map(find_run, sources):
        stored = read_manifest(source).config
        for entry in stored.get("environments") or [{}]:
            _check_reference(
                config, source, get_setting(entry, _TEMPERATURE, get_setting(stored, _TEMPERATURE, 1.0))
            )
            # A run that is older than these settings has none.
            sampling: dict[str, object] = {}
            for given in (stored, entry):
                sampling |= given.get("rollout", {}).get("sampling", {})
            altered |= {*SamplingConfig.model_validate(sampling).list_altered()}
    check_correction(config.train, sorted(altered))
    return sorted(altered)


def _check_reference(config: RunConfig, source: RunFolder, temperature: object) -> None:
    if config.train.kl.reference == "deployment" and temperature != 1.0:
        remedy = (
            f"{source.location} was sampled at {_TEMPERATURE} {temperature}, and vLLM does not divide the logits of a prompt by a "
            "temperature: set it to frozen, or leave this source out"
        )
        raise ConfigError("train.kl.reference", "deployment", remedy)


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


def check_tokenizers(config: RunConfig, sources: Sequence[str], field: str = "retrain.sources") -> None:
    """Refuse sources whose vocabulary differs from the start model's; missing models are not compared.

    Raises:
        ConfigError: names the source, and both models; `field` is the setting that has it.
    """
    ours = start_model_folder(config)
    for source in map(find_run, sources):
        try:
            theirs = stored_model_folder(read_manifest(source).config)
        except ValueError:
            # Settings of another version of Rollmill: the source's model is unknown.
            continue
        vocabularies = [read_vocabulary(folder / "tokenizer.json") for folder in (ours, theirs)]
        # Tokenizers with other pre-tokenization or templates are fine: stored token ids are used as they are.
        if all(vocabularies) and vocabularies[0] != vocabularies[1]:
            remedy = f"its rollouts have tokens of {theirs}, whose vocabulary differs from that of the start model {ours}"
            raise ConfigError(field, source.location, remedy)


def read_vocabulary(path: Path) -> list[object]:
    """Return the vocabulary in a tokenizer.json: its model's, and (id, token) of added tokens; [] if the file is missing."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    added = [(each["id"], each["content"]) for each in stored.get("added_tokens", [])]
    return [stored["model"]["vocab"], added]
