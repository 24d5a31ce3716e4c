"""The arms of an A/B comparison: runs that are trained from one run's stored rollouts by other scorers or algorithms."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollmill.flows.configuration.config import RescoreConfig, RunConfig
from rollmill.flows.configuration.presets import are_algorithms, merge_settings, preset_values
from rollmill.flows.configuration.settings import apply_overrides, name_override, scorer_overrides, validate
from rollmill.flows.offline.unscored import REWARD_COLUMNS, check_rescoring, is_rescored
from rollmill.flows.policies.policy_gate import HELD_OUT_SETTINGS
from rollmill.flows.run.folder import choose_version, is_finished, run_folder
from rollmill.tasks.errors import ConfigError, RunMismatchError
from rollmill.tasks.look.comparisons.paired_evaluations import is_complete
from rollmill.tasks.look.tables.scores import explain_keys
from rollmill.tasks.score.config import ScoreConfig
from rollmill.tasks.score.terms import RewardTerms, resolve_terms
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps
from rollmill.tasks.store.run.immutable_settings import get_setting, list_changes
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest
from rollmill.tasks.store.run.run_search import find_run, store_root

# Settings that do not change what an arm's policy is, or what it answers.
_INDIFFERENT = frozenset(
    {"observe", "serve", "store", "sync", "checkpoint", "max_restarts", "start_timeout_s"}
)
# Settings that decide what is sampled of a held-out prompt, and with which model: in them the source is comparable with its arms.
_REFERENCE_SETTINGS = ("model", "seed", "start_model", *HELD_OUT_SETTINGS)


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison: the run that is trained by a scorer and an algorithm.

    Attributes:
        label: its name in tables. Example: "addition@1, dapo".
        scores: NAME@VERSION of the scores that it trains on.
        run_name: folder of its run below `store.root`.
        config: all settings of its run.
    """

    label: str
    scores: str
    run_name: str
    config: RunConfig

    @property
    def folder(self) -> RunFolder:
        """The folder of its run."""
        return run_folder(self.run_name, self.config)

    @property
    def is_trained(self) -> bool:
        """True if all its steps are done."""
        return is_finished(self.folder) and read_manifest(self.folder).config["steps"] >= self.config.steps

    @property
    def version(self) -> int:
        """The policy version that is compared: its last one."""
        return choose_version(self.folder, -1)

    @property
    def is_evaluated(self) -> bool:
        """True if every held-out answer of its last version is stored."""
        return self.is_trained and is_complete(self.folder, self.version)


@dataclass(frozen=True)
class AbComparison:
    """What `rollmill ab` compares: each scorer with each algorithm is an arm.

    Attributes:
        run: location or name of the run whose rollouts are trained on.
        scorers: registered names or import paths, or {name: ..., args: ...} as YAML; none: that of the run. One alone is compared with that of the run.
        algorithms: names in conf/algorithms; none: that of the run. One alone, without scorers, is compared with that of the run.
        name: first part of the names of the arms' runs; empty: the run's name.
        where: condition on the groups to train on, as `retrain.where`.
        overrides: key=value, for all arms.
    """

    run: str
    scorers: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()
    name: str = ""
    where: str = ""
    overrides: tuple[str, ...] = ()

    @cached_property
    def folder(self) -> RunFolder:
        """The run whose rollouts are trained on."""
        return find_run(self.run)

    @cached_property
    def terms(self) -> dict[str, RewardTerms]:
        """The scorers by NAME@VERSION, in the order in which they are given.

        Raises:
            ConfigError: one cannot be loaded, is given twice, or needs groups, which held-out answers do not have.
        """
        found: dict[str, RewardTerms] = {}
        for key, (scorer, config) in self._score_configs.items():
            found[key] = terms = resolve_terms(config)
            if terms.by_group:
                remedy = "it compares the trajectories of a group, and held-out answers, which every arm is compared by, form none"
                raise ConfigError("--scorer", scorer or key, remedy)
        return found

    @cached_property
    def arms(self) -> list[Arm]:
        """The arms, by scorer and then by algorithm.

        Raises:
            ConfigError: a scorer, an algorithm or a setting is wrong.
        """
        algorithms = self.algorithms or ("",)
        if len(algorithms) == 1 and not self.scorers:
            algorithms = ("", *algorithms)
        if twice := [each for each, count in Counter(self.algorithms).items() if count > 1]:
            raise ConfigError("--algorithm", twice[0], "it is given twice; give it once")
        return [self._make_arm(key, algorithm) for key in self.terms for algorithm in algorithms]

    def check(self, *, trains: bool = True) -> None:
        """Refuse what cannot be compared, before anything starts; `trains` is False if only estimates are wanted.

        Raises:
            ConfigError: names the option or the setting.
            RunMismatchError: a run of an arm's name was trained with other settings; names them.
        """
        if read_manifest(self.folder).config.get("environments"):
            remedy = "it has several environments, whose scorers differ; compare scorers of a run with one environment"
            raise ConfigError("RUN", self.folder.location, remedy)
        if not list_steps(self.folder, "rollouts"):
            remedy = "it has no rollouts: name the run that sampled them"
            raise ConfigError("RUN", self.folder.location, remedy)
        for arm in self.arms if trains else ():
            _check_settings(arm)
        for key in self.terms:
            check_rescoring(self.folder, self.rescore_config(key))

    def rescore_config(self, key: str) -> RescoreConfig:
        """Return the settings of the flow rescore for the rollouts of the run, by the scorer NAME@VERSION."""
        # Rewards in a condition are by the scorer that is trained on, and of a rescoring by that of the run.
        where = "" if REWARD_COLUMNS.search(self.where) else self.where
        return self._rescore(self.folder, key, where=where)

    def _rescore(self, folder: RunFolder, key: str, **chosen: Any) -> RescoreConfig:
        config = self.arms[0].config
        store = config.store.model_copy(update={"root": store_root(folder)})
        return RescoreConfig(score=self._score_configs[key][1], store=store, observe=config.observe, **chosen)

    @cached_property
    def has_reference(self) -> bool:
        """True if the run has an evaluation of the arms' start model, made as those of the arms are."""
        if not is_complete(self.folder, 0):
            return False
        stored, given = read_manifest(self.folder).config, self.arms[0].config.model_dump(mode="json")
        return all(
            get_setting(stored, name, None) == get_setting(given, name, None) for name in _REFERENCE_SETTINGS
        )

    def list_evaluations(self) -> list[tuple[str, RunFolder, int, str]]:
        """List the compared policies: label, run, version, NAME@VERSION of the scorer of its stored rewards; "" if it is not known."""
        start = [("start model", self.folder, 0, "")] if self.has_reference else []
        return [*start, *((arm.label, arm.folder, arm.version, arm.scores) for arm in self.arms)]

    def find_unscored_evaluations(self) -> list[tuple[RunFolder, RescoreConfig]]:
        """List the evaluations that lack rewards by one of the scorers; all arms are evaluated."""
        configs = [
            (
                folder,
                self._rescore(folder, key, evaluations=True, first_step=version, last_step=version),
            )
            for _, folder, version, own in self.list_evaluations()
            for key in self.terms
            if key != own
        ]
        return [each for each in configs if not is_rescored(*each)]

    def list_unscored(self) -> list[str]:
        """List the scorers, NAME@VERSION, that have not scored every rollout of the run."""
        return [key for key in self.terms if not is_rescored(self.folder, self.rescore_config(key))]

    def list_arguments(self) -> list[str]:
        """List what the versions of scorers are digests of. Example: 'a.b@1-5feceb66 is a:b {"n": 2}'."""
        return explain_keys({key: terms.description for key, terms in self.terms.items()})

    @property
    def is_done(self) -> bool:
        """True if every part is stored: nothing is left but to print."""
        return (
            not self.list_unscored()
            and all(arm.is_evaluated for arm in self.arms)
            and not self.find_unscored_evaluations()
        )

    @cached_property
    def _score_configs(self) -> dict[str, tuple[str, ScoreConfig]]:
        """The given name and the settings of each scorer, by NAME@VERSION."""
        if not self.scorers and not self.algorithms:
            raise ConfigError(
                "--scorer", "", "name a scorer to compare with that of the run, or an algorithm (--algorithm)"
            )
        names = self.scorers or ("",)
        if len(self.scorers) == 1 and len(self.algorithms) < 2:
            names = ("", *names)
        found: dict[str, tuple[str, ScoreConfig]] = {}
        for scorer in names:
            config = validate(self._values(scorer)).score
            terms = resolve_terms(config)
            key = terms.key
            if key in found:
                remedy = (
                    f"it is {key}, and so is {found[key][0] or 'the scorer of the run'}: give another one"
                )
                raise ConfigError("--scorer", scorer, remedy)
            found[key] = scorer, config
        return found

    def _make_arm(self, key: str, algorithm: str) -> Arm:
        values = self._values(self._score_configs[key][0], algorithm)
        # Each arm is evaluated once, at its end, by the scorer that it trains on; the others rescore that evaluation.
        evaluate = values.get("evaluate", {}) | {"every": 0, "scorer": ""}
        chosen = {"where": self.where} if self.where else {}
        retrain = values.get("retrain", {}) | {"sources": [self.folder.absolute], "scores": key} | chosen
        config = validate({**values, "evaluate": evaluate, "retrain": retrain})
        parts = [
            self.name or self.folder.name,
            "ab",
            key.replace("@", "-"),
            *([algorithm] if algorithm else []),
        ]
        label = f"{key}, {algorithm}" if algorithm else key
        return Arm(label, key, "-".join(parts), config)

    def _values(self, scorer: str, algorithm: str = "") -> dict[str, Any]:
        """Return the settings of the run with those of an algorithm, with a scorer, and then with the overrides."""
        values = read_manifest(self.folder).config | {"retrain": {}}
        values["store"] = values.get("store", {}) | {"root": store_root(self.folder)}
        # An attached server of the run has no policy of an arm.
        values["serve"] = values.get("serve", {}) | {"urls": []}
        if algorithm:
            if not are_algorithms(algorithm):
                raise ConfigError("--algorithm", algorithm, "give a name in conf/algorithms")
            values = merge_settings(values, preset_values(algorithm))
        overrides = (*scorer_overrides(scorer), *self.overrides)
        with name_override(self.folder, overrides):
            values = apply_overrides(values, overrides)
            validate(values)
        for field in ("sources", "scores"):
            if given := values["retrain"].get(field):
                remedy = "every arm trains from the rollouts of RUN, by its own scorer; omit this"
                raise ConfigError(f"retrain.{field}", given, remedy)
        return values


def _check_settings(arm: Arm) -> None:
    """Refuse an arm whose run exists with other settings; more steps continue it."""
    if not has_manifest(arm.folder):
        return
    stored, given = read_manifest(arm.folder).config, arm.config.model_dump(mode="json")
    changes = list_changes(stored, {name: each for name, each in given.items() if name not in _INDIFFERENT})
    if stored.get("steps", 0) < arm.config.steps:
        changes = [each for each in changes if not each.startswith("steps: ")]
    if changes:
        raise RunMismatchError(
            f"{arm.folder.location} was trained with other settings: {', '.join(changes)}; give these, or another --name"
        )
