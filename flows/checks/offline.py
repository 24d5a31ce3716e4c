"""What must hold of a run that trains from stored rollouts, before anything is started."""

import json
from pathlib import Path

from flows.config import RunConfig
from flows.recipe import start_model_folder
from flows.running.folder import existing_run
from flows.settings import parsed
from tasks.errors import ConfigError
from tasks.score.advantages.registry import advantage_of
from tasks.score.check import check_scorer
from tasks.score.registry import parts_of
from tasks.store.kind import done_steps
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_scorers, stored_steps


def check_offline(config: RunConfig) -> None:
    """Refuse settings with which the flow retrain could not end well.

    Raises:
        ConfigError: there are no sources or no scores, the experts to be replayed are not stored, or held-out
            trajectories would be scored by another scorer than the one whose scores are trained on, without that being
            asked for.
    """
    if not config.retrain.sources:
        raise ConfigError("retrain.sources", (), "name the runs whose rollouts are to be trained on")
    advantage_of(config.score.advantage)
    if config.train.replay_routing:
        _check_routing(config)
    if not config.evaluate.enabled:
        return
    check_scorer(config.score, config.evaluate.scorer)
    scorer = parts_of(config.score)
    key = f"{scorer.name}@{scorer.version}"
    if not config.evaluate.scorer and key != config.retrain.scores:
        remedy = (
            f"held-out trajectories would be scored by {key}: set score.scorer to the scorer of these scores, name "
            "another in evaluate.scorer, or set evaluate.enabled=false"
        )
        raise ConfigError("retrain.scores", config.retrain.scores, remedy)


def _check_routing(config: RunConfig) -> None:
    for source, steps in steps_of_sources(config):
        if missing := sorted({*steps} - {*stored_steps(source, "routing")}):
            remedy = (
                f"{source.location} keeps no routed experts of step {missing[0]}, one of {len(missing)} without: draw "
                "from other steps (retrain.first_step, retrain.last_step), or set it to false"
            )
            raise ConfigError("train.replay_routing", True, remedy)


def steps_of_sources(config: RunConfig) -> list[tuple[RunFolder, list[int]]]:
    """The sources, and of each the steps to draw from: those that are done, within the bounds.

    A step is done when it has been trained on, or, in a run of the flow collect, when all its groups are collected.

    Raises:
        ConfigError: a source is no run or has no such scores, or no step is within the bounds.
    """
    scores, first, last = config.retrain.scores, config.retrain.first_step, config.retrain.last_step
    found, done = [], []
    for source in map(existing_run, config.retrain.sources):
        if scores not in (there_are := stored_scorers(source)):
            remedy = f"{source.location} has no such scores, but {', '.join(there_are) or 'none'}; `rollmill rescore` makes them"
            raise ConfigError("retrain.scores", scores, remedy)
        steps = done_steps(source, read_manifest(source))
        done.append(f"{source.location} has done {f'steps {steps[0]} to {steps[-1]}' if steps else 'none'}")
        found.append((source, [step for step in steps if first <= step and (last < 0 or step <= last)]))
    if found and not any(steps for _, steps in found):
        bounds = f"no step is from retrain.first_step = {first} to retrain.last_step = {last}"
        raise ConfigError("retrain.first_step", first, f"{bounds}: {', '.join(done)}")
    return found


def check_tokenizers(config: RunConfig) -> None:
    """Refuse sources whose tokens mean something else to the start model; models that are not there are not compared.

    Raises:
        ConfigError: names the source, and both models.
    """
    ours = start_model_folder(config)
    for source in map(existing_run, config.retrain.sources):
        try:
            theirs = start_model_folder(parsed(RunConfig, read_manifest(source).config))
        except ConfigError:
            continue  # settings of another Rollmill's run: its model is not known
        vocabularies = [_vocabulary(folder / "tokenizer.json") for folder in (ours, theirs)]
        if all(vocabularies) and vocabularies[0] != vocabularies[1]:
            remedy = (
                f"its rollouts are tokens of {theirs}, whose vocabulary is not that of the start model {ours}"
            )
            raise ConfigError("retrain.sources", source.location, remedy)


def _vocabulary(path: Path) -> list[object]:
    """What says which token an id is; empty when the file is not there."""
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    added = [(each["id"], each["content"]) for each in stored.get("added_tokens", [])]
    return [stored["model"]["vocab"], added]
