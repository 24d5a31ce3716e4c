"""The gate: may a policy replace the one in production? Decided from stored evaluations of both."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import find_fixed_settings, validate
from rollmill.flows.run.folder import run_folder
from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.look.comparisons.changed_answers import count_failed_scores
from rollmill.tasks.look.comparisons.paired_evaluations import (
    digest_evaluation,
    explain_checks,
    has_same_prompts,
    is_complete,
    make_checks,
    read_answers,
)
from rollmill.tasks.observe.metrics import ALL
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.lineage.lineage_trace import find_wrong_policy_files, locate_run
from rollmill.tasks.store.lineage.policy_lineage import LINEAGE, Lineage, read_lineage
from rollmill.tasks.store.promotion.gate_record import GatedPolicy, GateRecord, write_gate
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias, now, resolve_policy
from rollmill.tasks.store.run.former_settings import read_former
from rollmill.tasks.store.run.immutable_settings import get_setting
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.run.run_search import store_root

DEFAULT_ALIAS = "policies/production"
HELD_OUT_SETTINGS = (
    *("rollout.environment", "rollout.prompts.system", "rollout.agent.command", "rollout.agent.problems"),
    *("rollout.chat_template", "rollout.chat_template_kwargs"),
    *("rollout.temperature", "rollout.max_completion_tokens", "rollout.sampling", "serve.max_model_len"),
    *("rollout.max_prompt_tokens", "rollout.long_prompts"),
    *("rollout.sandbox.timeout_s", "rollout.sandbox.memory_bytes"),
    *("evaluate.samples", "evaluate.temperature"),
)
"""Settings that decide what is sampled of a held-out prompt. Two evaluations that differ in one are not compared."""
# These decide its reward too.
_EVALUATION_SETTINGS = (
    *HELD_OUT_SETTINGS,
    *("score.scorer", "score.sum", "score.judge", "score.reward_model", "evaluate.scorer"),
    *("score.sandbox.timeout_s", "score.sandbox.memory_bytes"),
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of a policy: the run that stores it, and the version there."""

    run: RunFolder
    version: int


@dataclass(frozen=True, slots=True)
class MissingEvaluation:
    """An evaluation that the flow evaluate can make: name and settings of a run whose start model is the policy."""

    run_name: str
    config: RunConfig


@dataclass(frozen=True)
class PolicyGate:
    """The comparison of a candidate with the policy in production.

    Attributes:
        candidate: folder of an exported policy, or an alias.
        alias: location of the alias that the candidate is to have.
        against: another policy to compare with, by folder or alias; empty: the one that `alias` leads to.
        margin, error_rate, min_reward: see `GateRecord`.
    """

    candidate: str
    alias: str = DEFAULT_ALIAS
    against: str = ""
    margin: float = 0.05
    error_rate: float = 0.05
    min_reward: float | None = None

    @cached_property
    def policies(self) -> tuple[RunFolder, RunFolder | None]:
        """Folders of the candidate, and of the policy in production; None if there is none.

        Raises:
            ConfigError: the candidate is in production, or one of both is no exported policy.
        """
        current = PolicyAlias(self.alias).current()
        first = find_policy("CANDIDATE", self.candidate)
        second = find_policy("--against", self.against) if self.against else None
        if current and not self.against:
            second = resolve_policy(current.policy)
        if second == first:
            raise ConfigError("CANDIDATE", self.candidate, "it is the policy that it would be compared with")
        return first, second

    @cached_property
    def lineages(self) -> tuple[Lineage, Lineage | None]:
        """Lineages of both policies; StoreError if a file of one is not what was exported."""
        first, second = self.policies
        return read_intact(first), read_intact(second) if second else None

    def find_missing(self) -> MissingEvaluation | None:
        """Return the first evaluation that the comparison lacks; None if it has all. ConfigError if it cannot be made."""
        candidate = self._find_candidate()
        policy, lineage = self.policies[0], self.lineages[0]
        if candidate is not None:
            if self.policies[1] is None or self._find_production(candidate) is not None:
                return None
            policy, lineage = self.policies[1], self.lineages[1] or lineage
        if not policy.is_local:
            remedy = (
                f"it has no evaluation like that of the other policy, and vLLM reads models from a disk: copy it there and name the "
                f"copy, or run `rollmill evaluate {lineage.folder} --version {lineage.version}`"
            )
            raise ConfigError("policy", policy.location, remedy)
        return self._plan(policy, lineage)

    def explain_unlike(self, made: MissingEvaluation) -> ConfigError:
        """Return why an evaluation that was made still cannot be compared with the other policy's."""
        run = run_folder(made.run_name, made.config)
        remedy = (
            f"its evaluation in {run.location} has other held-out prompts than that of the other policy: the prompts have changed "
            f"since. Remove {run.location}, and gate a policy that is evaluated on today's prompts"
        )
        return ConfigError("CANDIDATE", self.candidate, remedy)

    def decide(self) -> GateRecord:
        """Compare the policies by their stored evaluations, and store the decision; `find_missing` has returned None."""
        first = self._find_candidate()
        assert first is not None
        second = self._find_production(first) if self.policies[1] else None
        answers = read_answers(first.run, first.version)
        other = read_answers(second.run, second.version) if second else None
        checks = make_checks(answers, other, self.margin, self.error_rate)
        reasons = explain_checks(checks, self.margin)
        sampled = next(each for each in checks if each.answers == "sampled")
        if self.min_reward is not None and sampled.candidate < self.min_reward:
            reasons.append(
                f"sampled reward: {sampled.candidate:.3f}, at least {self.min_reward:g} is required"
            )
        production, lineage = self.policies[1], self.lineages[1]
        reasons += [reason for each in (first, second) if each and (reason := _explain_failed_scores(each))]
        record = GateRecord(
            created_at=now(),
            candidate=_describe(self.policies[0], self.lineages[0], first),
            against=_describe(production, lineage, second) if production and lineage and second else None,
            margin=self.margin,
            error_rate=self.error_rate,
            min_reward=self.min_reward,
            checks=tuple(checks),
            reasons=tuple(reasons),
        )
        write_gate(PolicyAlias(self.alias).root, record)
        return record

    def _find_candidate(self) -> Evaluation | None:
        policy, lineage = self.policies[0], self.lineages[0]
        for each in self._list_places(policy, lineage):
            if is_complete(each.run, each.version) and self._is_alike(each):
                return each
        return None

    def _find_production(self, candidate: Evaluation) -> Evaluation | None:
        """Find an evaluation of the policy in production under the candidate's settings, on the same prompts."""
        policy, lineage = self.policies[1], self.lineages[1]
        assert policy
        assert lineage
        prompts = read_answers(candidate.run, candidate.version)
        for each in self._list_places(policy, lineage):
            if not is_complete(each.run, each.version) or not self._is_alike(each):
                continue
            if has_same_prompts(prompts, read_answers(each.run, each.version)):
                return each
        return None

    def _list_places(self, policy: RunFolder, lineage: Lineage) -> list[Evaluation]:
        """List where an evaluation of a policy may be: in its run, or in the one that `_plan` names."""
        planned = self._plan(policy, lineage)
        return [
            Evaluation(locate_run(policy, lineage), lineage.version),
            Evaluation(run_folder(planned.run_name, planned.config), 0),
        ]

    def _plan(self, policy: RunFolder, lineage: Lineage) -> MissingEvaluation:
        """Plan to evaluate a policy as the start model of a new run, with the settings of the candidate's run."""
        values = self._settings
        changed = {
            "model": policy.location,
            "start_model": {**values.get("start_model", {}), "steps": 0},
            # Servers that run already have another policy, and it cannot be seen which.
            "serve": {**values.get("serve", {}), "urls": []},
            # An evaluation needs no actors, which need servers that run already.
            "executor": {},
            "retrain": {},
            "steps": 1,
        }
        config = validate({**values, **changed}, trains=False)
        stored = config.model_dump(mode="json")
        # A run is resumed under the same fixed settings alone.
        fixed = {name: get_setting(stored, name, None) for name in find_fixed_settings()}
        digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
        return MissingEvaluation(f"gate-{lineage.digest[:12]}-{digest[:8]}", config)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings of the candidate's run, in the folder of which new runs are made."""
        policy, lineage = self.policies[0], self.lineages[0]
        run = locate_run(policy, lineage)
        try:
            values = read_manifest(run).config
        except StoreError:
            # The run is not here; the policy has its settings.
            return read_former(lineage.settings)
        return {**values, "store": {**values.get("store", {}), "root": store_root(run)}}

    def _is_alike(self, evaluation: Evaluation) -> bool:
        """Return True if an evaluation was made under the settings of the candidate's run."""
        stored = read_manifest(evaluation.run).config
        return _evaluation_settings(stored) == _evaluation_settings(self._settings)


def find_policy(field: str, location: str) -> RunFolder:
    """Return the folder of an exported policy that is given by its folder or by an alias; ConfigError, which names `field`, if it is none."""
    policy = resolve_policy(location)
    if not open_files(policy).keys(LINEAGE):
        remedy = f"it has no {LINEAGE}: give the folder of an exported policy; `rollmill export-policy RUN FOLDER` makes one"
        raise ConfigError(field, location, remedy)
    return policy


def read_intact(policy: RunFolder) -> Lineage:
    """Read the lineage of a policy and compare every byte of its files; StoreError names what differs."""
    lineage = read_lineage(policy)
    for each in find_wrong_policy_files(policy, lineage):
        raise StoreError(f"{each.where}: {each.what}; {each.remedy}")
    return lineage


def _evaluation_settings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what decides an evaluation's rows, of each environment; a run older than a setting has its default."""
    defaults = RunConfig().model_dump(mode="json")
    of_run = {
        name: get_setting(config, name, get_setting(defaults, name, None)) for name in _EVALUATION_SETTINGS
    }
    return [
        {name: get_setting(entry, name, default) for name, default in of_run.items()}
        for entry in config.get("environments") or [{}]
    ]


def _explain_failed_scores(evaluation: Evaluation) -> str:
    """Return why an evaluation blocks the candidate if a scorer failed on answers of it; else empty."""
    n = count_failed_scores(evaluation.run, ALL, evaluation.version)
    if not n:
        return ""
    run = evaluation.run.location
    return (
        f"{n} held-out answers of version {evaluation.version} in {run} have no reward, since their scorer failed: "
        f"`rollmill inspect {run} --evaluations --status unscored` shows why; repair the scorer, run "
        f"`rollmill evaluate {run} --redo-failed`, then gate the candidate again"
    )


def _describe(policy: RunFolder, lineage: Lineage, evaluation: Evaluation) -> GatedPolicy:
    return GatedPolicy(
        location=policy.absolute,
        digest=lineage.digest,
        run=lineage.run,
        version=lineage.version,
        evaluated_in=evaluation.run.absolute,
        evaluated_version=evaluation.version,
        rows=digest_evaluation(evaluation.run, evaluation.version),
    )
