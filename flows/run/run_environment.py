"""One environment of an open run: its settings, the environment itself, its scorers, and what plays its episodes."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.environments import environment_configs, group_shares, name_environment
from rollmill.tasks.observe.metrics import ALL, Metric
from rollmill.tasks.processes.machine import allow_open_files
from rollmill.tasks.rollout.chat_tokenizer import ChatTokenizer
from rollmill.tasks.rollout.completions import PoolSampler
from rollmill.tasks.rollout.environment import Environment
from rollmill.tasks.rollout.environment_calls import state_columns
from rollmill.tasks.rollout.episode import EpisodePlayer
from rollmill.tasks.rollout.prompt_limit import PromptLimit
from rollmill.tasks.rollout.remote_environment import RemoteEnvironment, open_environment
from rollmill.tasks.rollout.segment_builder import RowLimit
from rollmill.tasks.rollout.trajectory_requests import check_prompts
from rollmill.tasks.score.scoring import Scoring, combined_key
from rollmill.tasks.serve.server_pool import ServerPool
from rollmill.tasks.store.environment_states import check_stored_columns
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.user_code.plug_in import PlugIn

CUT_PROMPTS = "rollout/cut_prompts_so_far"


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """One environment of an open run.

    Attributes:
        name: value of the column `env` in its rows.
        config: the run's settings, with those that the environment overrides.
        held_out_scoring: scores held-out trajectories; the same object as `scoring` without evaluate.scorer.
        player: plays its episodes with the run's servers.
    """

    name: str
    config: RunConfig
    environment: Environment
    scoring: Scoring
    held_out_scoring: Scoring
    player: EpisodePlayer


async def open_environments(
    config: RunConfig,
    run: str,
    folder: RunFolder,
    tokenizer: ChatTokenizer,
    pool: ServerPool,
    stack: AsyncExitStack,
    logs: Path | None = None,
) -> tuple[RunEnvironment, ...]:
    """Open all environments of a run, in the order of `environment_configs`, with their scorers; `stack` closes them.

    `logs` is the folder of their worker processes' logs; None: that of the run.

    Raises:
        ConfigError: one does not fit the run's stored states, or has too few prompts.
    """
    # Their requests and sandboxes are hundreds at once.
    allow_open_files()
    configs, shares = environment_configs(config), group_shares(config)
    scorings = await _open_scorings(configs, run, stack)
    opened = []
    for at, (name, own) in enumerate(configs.items()):
        own_logs = (logs or folder.logs) / name
        own_logs.mkdir(parents=True, exist_ok=True)
        with name_environment(config, name):
            environment = await stack.enter_async_context(open_environment(own.rollout, logs=own_logs))
            check_stored_columns(folder, name or environment.name, state_columns(environment))
            check_prompts(environment, own.rollout, own.evaluate.n_prompts, shares.most_per_step(at))
            player = make_player(own, run, environment, tokenizer, pool)
        opened.append(RunEnvironment(name or environment.name, own, environment, *scorings[name], player))
    return tuple(opened)


async def _open_scorings(
    configs: Mapping[str, RunConfig], run: str, stack: AsyncExitStack
) -> dict[str, tuple[Scoring, Scoring]]:
    """Open the scorings of each environment's steps and evaluations; those with equal settings are the same object."""
    opened: dict[str, Scoring] = {}
    found = {}
    for name, config in configs.items():
        pair = []
        for scorer in (PlugIn(), config.evaluate.scorer):
            settings = f"{scorer} {config.score.model_dump_json()}"
            if settings not in opened:
                scoring = Scoring(
                    config.score, run, scorer=scorer, env_variables=config.rollout.env_variables
                )
                opened[settings] = await stack.enter_async_context(scoring)
            pair.append(opened[settings])
        found[name] = (pair[0], pair[1])
    # Rewards of a step have one key, whichever environment they are of: a batch, and each table, is of one.
    key = combined_key({name: scoring.key for name, (scoring, _) in found.items()})
    parts = {name: scoring.description or scoring.key for name, (scoring, _) in found.items()}
    for scoring, _ in found.values():
        if scoring.key != key:
            scoring.store_as(key, ", ".join(f"{name}: {part}" for name, part in parts.items()))
    return found


def make_player(
    config: RunConfig, run: str, environment: Environment, tokenizer: ChatTokenizer, pool: ServerPool
) -> EpisodePlayer:
    """Make the player that runs an environment's episodes, with completions from the vLLM servers of `pool`."""
    stop = tokenizer.stop_ids(environment.stop)
    if environment.tools:
        # Of an environment in worker processes, the tools are known only now.
        tokenizer.check_turns("tool", environment.tools)
    return EpisodePlayer(
        environment=environment,
        tokenizer=tokenizer,
        sampler=PoolSampler(pool, config.rollout, run, config.serve.request_timeout_s, stop_token_ids=stop),
        max_tokens=config.serve.max_model_len,
        prompt_limit=PromptLimit.from_config(config.rollout, config.serve.max_model_len),
        timeout_s=config.rollout.trajectory_timeout_s,
        row_limit=RowLimit(
            config.train.micro_batch_tokens,
            config.rollout.max_completion_tokens,
            is_padded=config.train.layout == "padded",
        ),
    )


def environment_metrics(environments: Sequence[RunEnvironment]) -> list[Metric]:
    """Return the load of all scorers since the last call, and the restarts of worker processes and cut prompts so far."""
    scorings = {id(each.scoring): each.scoring for each in environments}
    metrics = list(chain.from_iterable(each.metrics() for each in scorings.values()))
    remote = [each.environment for each in environments if isinstance(each.environment, RemoteEnvironment)]
    if remote:
        n_restarts = float(sum(each.restarts for each in remote))
        metrics.append(Metric("rollout/env_restarts_so_far", ALL, "value", n_restarts))
    limits = [each.player.prompt_limit for each in environments if each.player.prompt_limit]
    n_cut = float(sum(each.n_cut for each in limits))
    if n_cut or any(each.keeps_end for each in limits):
        metrics.append(Metric(CUT_PROMPTS, ALL, "value", n_cut))
    return merge_metrics(metrics)


def merge_metrics(metrics: Iterable[Metric]) -> list[Metric]:
    """Merge metrics of several processes or parts of one: of one name, peaks are the largest of any, counts are added."""
    merged: dict[tuple[str, str], Metric] = {}
    for metric in metrics:
        key = (metric.name, metric.stat)
        before = merged.get(key, metric)
        value = max(before.value, metric.value) if metric.stat == "max" else before.value + metric.value
        merged[key] = replace(metric, value=value) if key in merged else metric
    return list(merged.values())
