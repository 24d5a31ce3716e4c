"""RunConfig: the stages' settings composed, and those that only flows go by."""

from tasks.config import StageConfig, setting
from tasks.observe.config import ObserveConfig
from tasks.rollout.config import RolloutConfig
from tasks.score.config import ScoreConfig
from tasks.serve.config import ServeConfig
from tasks.store.config import StoreConfig
from tasks.sync.config import SyncConfig
from tasks.train.config import StartModelConfig, TrainConfig


class EvaluateConfig(StageConfig):
    """Held-out evaluation, greedy and sampled."""

    enabled: bool = setting(
        True, "Evaluate at all; without, a run that trains from stored rollouts needs no vLLM server."
    )
    every: int = setting(
        10, "Steps between two evaluations; the first and the last version always have one.", ge=1
    )
    n_prompts: int = setting(512, "Held-out prompts, the same each time.", ge=1, fixed=True)
    scorer: str = setting("", "Scorer of held-out trajectories, one by one; empty: score.scorer.", fixed=True)
    prompts_per_task: int = setting(64, "Held-out prompts of one evaluation task run.", ge=1)
    version: int = setting(
        -1,
        "Policy version that the flow evaluate takes, one with a checkpoint, or 0 for the start model; -1: the last.",
        ge=-1,
    )


class RetrainConfig(StageConfig):
    """Training from stored rollouts and a scores data set; only the flow retrain goes by it."""

    sources: tuple[str, ...] = setting(
        (), "Runs whose rollouts are trained on: folders, or s3://bucket/prefix.", fixed=True
    )
    scores: str = setting("", "NAME@VERSION of the scores that rewards come from.", fixed=True)
    groups_per_step: int = setting(
        32,
        "Groups of one step, drawn from all that can be trained on; none comes twice in one pass over them.",
        ge=1,
        fixed=True,
    )
    first_step: int = setting(0, "First step of the sources to draw from.", ge=0, fixed=True)
    last_step: int = setting(
        -1, "Last step of the sources to draw from; -1: all that are done.", ge=-1, fixed=True
    )


class RescoreConfig(StageConfig):
    """All settings of the flow rescore."""

    score: ScoreConfig = setting(ScoreConfig(), "The scorer, and where it runs.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")
    first_step: int = setting(0, "First step to score.", ge=0)
    last_step: int = setting(-1, "Last step to score; -1: the last one there is.", ge=-1)
    redo_failed: bool = setting(False, "Score again what the scorer failed on.")
    max_failed_share: float = setting(
        0.5, "Share of the scores within the bounds that may fail before rescoring stops.", ge=0.0, le=1.0
    )
    evaluations: bool = setting(False, "Score stored held-out trajectories too.")
    groups_per_task: int = setting(32, "Groups that one score task run scores.", ge=1)
    tasks_in_flight: int = setting(4, "Score task runs at the same time; what they score is in memory.", ge=1)


class RunConfig(StageConfig):
    """All settings of a run."""

    seed: int = setting(0, "Seed of prompts, sampling and the start model.", ge=0, lt=2**31, fixed=True)
    steps: int = setting(40, "Steps of the whole run.", ge=1)
    model: str = setting(
        "", "Folder of the start model (Hugging Face format); empty with start_model.enabled.", fixed=True
    )
    rollout: RolloutConfig = setting(RolloutConfig(), "Sampling.")
    score: ScoreConfig = setting(ScoreConfig(), "Scoring and advantages.")
    train: TrainConfig = setting(TrainConfig(), "The trainer.")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "Held-out evaluation.")
    serve: ServeConfig = setting(ServeConfig(), "The vLLM servers.")
    sync: SyncConfig = setting(SyncConfig(), "Weights from the trainer to the servers.")
    store: StoreConfig = setting(StoreConfig(), "The data sets.")
    observe: ObserveConfig = setting(ObserveConfig(), "What is measured and recorded.")
    start_model: StartModelConfig = setting(StartModelConfig(), "Make a small start model here.")
    retrain: RetrainConfig = setting(RetrainConfig(), "Training from stored rollouts.")

    @property
    def trajectories_per_step(self) -> int:
        """P x G."""
        return self.rollout.groups_per_step * self.rollout.group_size
