"""Settings of scoring and advantages."""

from typing import Literal

from rollmill.tasks.config import ADDRESS, VARIABLE, YEAR_S, SecretVariable, StageConfig, setting
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.user_code.plug_in import PlugIn

RUBRIC = """\
- An attempt that reaches its goal scores well above every attempt that does not.
- Among attempts that reach it, the one that does so with less waste scores slightly higher.
- An attempt that comes closer to the goal scores higher than one that is further from it.
- Attempts that are equally good get the same score, whatever their style or length.
"""


class EndpointConfig(StageConfig):
    """A model served over HTTP."""

    api_key_env: SecretVariable = setting(
        "",
        "Environment variable that holds the API key, ROLLMILL_*, *_KEY or *_TOKEN; empty: no key.",
        pattern=VARIABLE,
    )


class JudgeConfig(EndpointConfig):
    """The LLM of the scorers judge and ruler, served by any endpoint with OpenAI's chat completions."""

    url: str = setting(
        "", "Base URL, such as https://host/v1; chat/completions is appended.", pattern=ADDRESS
    )
    model: str = setting("", "Name of the model.", fixed=True)
    prompt_file: str = setting(
        "",
        "File with the prompt of the scorer `judge`: a Jinja template with messages, answer, example, outcome and env; empty: a "
        "general prompt.",
        fixed=True,
    )
    rubric: str = setting(RUBRIC, "Criteria by which the scorer `ruler` compares trajectories.", fixed=True)
    temperature: float = setting(0.0, "Sampling temperature of the judge.", ge=0.0, le=10.0, fixed=True)
    max_tokens: int = setting(2048, "Largest number of tokens of one judgement.", ge=1)
    score_range: tuple[float, float] = setting(
        (0.0, 1.0), "Smallest and largest score that `judge` may give.", fixed=True
    )


class RewardModelConfig(EndpointConfig):
    """A reward model that vLLM serves (`vllm serve MODEL --runner pooling`)."""

    url: str = setting("", "Base URL of the server, such as http://host:8000.", pattern=ADDRESS)
    model: str = setting("", "Name of the model; empty: the one that the server has.", fixed=True)
    output: int = setting(0, "Index of the model's output that is the reward, from 0.", ge=0, fixed=True)


class WeightedScorer(StageConfig):
    """One term of a weighted sum of rewards."""

    scorer: PlugIn = setting(..., "Scorer: a registered name, or an import path package.module:attribute.")
    weight: float = setting(1.0, "Factor of its reward.")


class ScoreConfig(StageConfig):
    """Settings of scoring and advantages."""

    scorer: PlugIn = setting(
        PlugIn(),
        "Scorer: a registered name, or an import path package.module:attribute. It has no default.",
        fixed=True,
        basic=True,
    )
    advantage: PlugIn = setting(
        PlugIn(name="mean"),
        "How advantages follow from rewards. none: the reward. zero: 0, for training by the KL term alone. mean: minus the group's mean. mean_std: that, divided by the "
        "group's standard deviation. rloo: minus the mean of the group's other rewards. reinforce_pp: minus the group's "
        "mean, divided by the batch's standard deviation. Or an import path package.module:function (docs/reference/algorithms.md).",
        fixed=True,
        basic=True,
    )
    credit: Literal["trajectory", "turn", "token"] = setting(
        "trajectory",
        "Which tokens share one advantage. trajectory: all sampled tokens of a trajectory. turn, token: each turn or token has a "
        "separate one, from the rewards that follow it, compared with the same turn or token of the group.",
        fixed=True,
    )
    discount: float = setting(
        1.0,
        "Factor that multiplies a later reward for each turn or token in between, with `credit` turn or token. 0: only its own reward.",
        ge=0.0,
        le=1.0,
        fixed=True,
    )
    sum: tuple[WeightedScorer, ...] = setting(
        (), "Scorers whose weighted rewards are added up; if there are any, `scorer` is not used.", fixed=True
    )
    judge: JudgeConfig = setting(JudgeConfig(), "The LLM of the scorers judge and ruler.")
    reward_model: RewardModelConfig = setting(RewardModelConfig(), "The model of the scorer reward_model.")
    sandbox: SandboxConfig = setting(
        SandboxConfig(), "The sandbox of the scorer `code`, and of your scorers that open one."
    )
    timeout_s: float = setting(60.0, "Time limit of one call of a scorer, in seconds.", gt=0.0, le=YEAR_S)
    workers: int = setting(1, "Worker processes for scorers that are not asynchronous.", ge=1, le=4096)
    max_in_flight: int = setting(64, "Largest number of concurrent calls of asynchronous scorers.", ge=1)
    overlong_tokens: tuple[int, ...] = setting(
        (),
        "Lengths [A, B] in tokens between which a trajectory loses reward before advantages are computed, linearly from 0 at A "
        "to 1 at B and above (DAPO's soft overlong punishment); empty: off.",
        fixed=True,
    )
    train_truncated: bool = setting(
        True,
        "Train on trajectories that reached the length limit; if off, they only count in the baseline of their group.",
        fixed=True,
    )
    train_without_spread: bool = setting(
        False,
        "Train on groups whose rewards are all equal too, for a KL term or an entropy bonus; if off, they are left out.",
        fixed=True,
    )
    min_group_size: int = setting(
        2,
        "Smallest number of successful trajectories with which a group is trained on. 0: all of them; a scorer of whole groups "
        "is then not called for a partial one.",
        ge=0,
        fixed=True,
    )

    @property
    def needs_full_group(self) -> bool:
        """True if a group with a failed trajectory is neither scored as a whole nor trained on."""
        return self.min_group_size == 0
