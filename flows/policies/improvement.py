"""The cycles of an improvement: which logs each trains on, under which settings, and which policy it makes."""

from dataclasses import dataclass

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.configuration.settings import validate
from rollmill.flows.run.folder import is_finished, run_folder
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import MANIFEST, RunFolder, policy_key
from rollmill.tasks.store.lineage.policy_lineage import read_lineage
from rollmill.tasks.store.promotion.gate_record import read_gate
from rollmill.tasks.store.promotion.policy_alias import PolicyAlias, resolve_policy
from rollmill.tasks.store.reader import list_steps
from rollmill.tasks.store.run.manifest import has_manifest, read_manifest


@dataclass(frozen=True, slots=True)
class Cycle:
    """One pass from new logs to a policy that is compared with the one in production.

    Its number is that of the imported steps when it began, so the same logs always give the same cycle.

    Attributes:
        first_step: the first step that was imported after the cycle whose policy was promoted last.
        number: the number of imported steps.
        run_name: of the run that trains on the steps from `first_step` to `number - 1`.
    """

    first_step: int
    number: int
    run_name: str


@dataclass(frozen=True, slots=True)
class Improvement:
    """The runs of an improvement: NAME-logs has all imported conversations, and NAME-K is trained by the cycle K.

    Attributes:
        alias: of the policy in production.
        thresholds: margin, error rate and smallest reward of the gate.
    """

    name: str
    config: RunConfig
    alias: PolicyAlias
    thresholds: tuple[float, float, float | None]

    @property
    def logs_name(self) -> str:
        """Name of the run that the logs are imported to."""
        return f"{self.name}-logs"

    @property
    def logs(self) -> RunFolder:
        """Folder of that run."""
        return run_folder(self.logs_name, self.config)

    def list_numbers(self) -> list[int]:
        """Return the numbers of the cycles that have begun to train, ascending."""
        files = open_files(RunFolder(self.config.store.root))
        names = [
            key.split("/")[0].removeprefix(f"{self.name}-") for key in files.keys(f"{self.name}-*/{MANIFEST}")
        ]
        return sorted(int(each) for each in names if each.isdecimal() and str(int(each)) == each)

    def find_open(self) -> Cycle | None:
        """Return the newest cycle if its training has begun and its policy is not decided on; None otherwise."""
        numbers = self.list_numbers()
        cycle = self._cycle(numbers[-1]) if numbers else None
        return None if cycle is None or self.is_decided(cycle) else cycle

    def find_newest(self) -> Cycle | None:
        """Return the cycle of all that is imported; None if nothing is."""
        steps = list_steps(self.logs, "metrics")
        return self._cycle(len(steps)) if steps else None

    def _cycle(self, number: int) -> Cycle:
        # Conversations of a cycle that was blocked are trained on again, with those that came since.
        policies = {record.policy for _, record in self.alias.history()}
        earlier = [each for each in self.list_numbers() if each < number]
        promoted = [each for each in earlier if resolve_policy(self._policy(each)).absolute in policies]
        return Cycle(max(promoted, default=0), number, self._run_name(number))

    def _run_name(self, number: int) -> str:
        return f"{self.name}-{number}"

    def training_config(self, cycle: Cycle) -> RunConfig:
        """Return the settings under which a cycle trains its imported steps, from the policy in production.

        The trainer computes the log-probabilities that the logs lack, and the policy is exported at the end. The gate evaluates it, so
        training needs no servers. A cycle that has begun keeps its start model and its rows, also if the alias was moved since.
        """
        config, folder = self.config, run_folder(cycle.run_name, self.config)
        terms = resolve_terms(config.score)
        where = f"step >= {cycle.first_step} and step < {cycle.number}"
        if config.retrain.where:
            where += f" and ({config.retrain.where}\n)"
        changed = {
            "retrain": {
                "sources": (self.logs.absolute,),
                "scores": f"{terms.name}@{terms.version}",
                "where": where,
            },
            "train": {"old_logprobs": "trainer"},
            "checkpoint": {"export_every": config.steps},
            "evaluate": {"every": 0},
        }
        sections = {
            section: getattr(config, section).model_copy(update=values) for section, values in changed.items()
        }
        if has_manifest(folder):
            stored = validate(read_manifest(folder).config)
            kept = {"model": stored.model, "start_model": stored.start_model, "retrain": stored.retrain}
            return config.model_copy(update=sections | kept)
        return config.model_copy(update=sections | self._start_model())

    def _start_model(self) -> dict[str, object]:
        if current := self.alias.current():
            return {
                "model": current.policy,
                "start_model": self.config.start_model.model_copy(update={"steps": 0}),
            }
        return {}

    def is_decided(self, cycle: Cycle) -> bool:
        """Return True if the policy of a cycle was in production once, or may not replace the one that is there now."""
        if not is_finished(run_folder(cycle.run_name, self.config)):
            return False
        digest = read_lineage(RunFolder(self.policy(cycle))).digest
        promoted = [record.digest for _, record in self.alias.history()]
        gate = read_gate(self.alias.root, digest, promoted[0] if promoted else "")
        if gate is None or gate.passed:
            return digest in promoted
        # Other thresholds are another decision.
        return (gate.margin, gate.error_rate, gate.min_reward) == self.thresholds

    def policy(self, cycle: Cycle) -> str:
        """Return the folder of the policy that a cycle exports."""
        return self._policy(cycle.number)

    def _policy(self, number: int) -> str:
        run = run_folder(self._run_name(number), self.config)
        steps = read_manifest(run).config["steps"] if has_manifest(run) else self.config.steps
        return RunFolder(run.path(policy_key(steps))).absolute
