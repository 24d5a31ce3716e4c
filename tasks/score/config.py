"""Settings of scoring and advantages."""

from tasks.config import StageConfig, setting, variable

JUDGE_PROMPT = """\
Judge the last answer of the assistant in this conversation.

{% for message in messages %}
[{{ message.role }}] {{ message.content }}
{% endfor %}
{% if example.answer is defined %}
Reference answer: {{ example.answer }}
{% endif %}

Reply with one JSON object and nothing else: {"explanation": "one sentence", "score": S}, where S is a number from 0
(useless) to 1 (correct and complete).
"""

RUBRIC = """\
- An attempt that reaches its goal scores well above every attempt that does not.
- Among attempts that reach it, the one that does so with less waste scores slightly higher.
- An attempt that comes closer to the goal scores higher than one that is further from it.
- Attempts that are equally good get the same score, whatever their style or length.
"""


class EndpointConfig(StageConfig):
    """A model behind HTTP."""

    api_key_env: str = variable("", "Environment variable that holds the API key; empty: no key.")
    timeout_s: float = setting(
        30.0, "Seconds one request may take; with its retries it must fit score.timeout_s.", gt=0.0
    )
    connect_timeout_s: float = setting(5.0, "Seconds to open a connection.", gt=0.0)
    max_attempts: int = setting(
        4, "Sends of one request, the first included, when the error is transient.", ge=1
    )
    retry_backoff_s: float = setting(
        0.5, "Seconds before the second send; doubled each time, with jitter.", gt=0.0
    )


class JudgeConfig(EndpointConfig):
    """An LLM that judges, behind any endpoint that speaks OpenAI's chat completions."""

    url: str = setting("", "Base URL of the endpoint, such as https://host/v1; chat/completions is added.")
    model: str = setting("", "Model to ask for.", fixed=True)
    prompt: str = setting(
        JUDGE_PROMPT,
        "Prompt of the scorer `judge`: a Jinja template over messages, answer, example, outcome and env.",
        fixed=True,
    )
    prompt_file: str = setting("", "File that holds the prompt; empty: `prompt` is it.", fixed=True)
    rubric: str = setting(RUBRIC, "What the scorer `ruler` goes by when it compares attempts.", fixed=True)
    temperature: float = setting(0.0, "Sampling temperature of the judge.", ge=0.0, le=10.0, fixed=True)
    max_tokens: int = setting(2048, "Most tokens of one judgement.", ge=1)
    score_min: float = setting(0.0, "Least score that `judge` may give.", fixed=True)
    score_max: float = setting(1.0, "Largest score that `judge` may give.", fixed=True)


class RewardModelConfig(EndpointConfig):
    """A reward model served by vLLM (`vllm serve MODEL --runner pooling`)."""

    url: str = setting("", "Base URL of the server, such as http://host:8000.")
    model: str = setting("", "Model to ask for; empty: the one that the server has.", fixed=True)
    output: int = setting(0, "Which output of the model is the reward, from 0.", ge=0, fixed=True)
    use_activation: bool = setting(
        False, "Take the reward after the model's sigmoid or softmax instead of as it is.", fixed=True
    )


class WeightedScorer(StageConfig):
    """One part of a weighted sum."""

    scorer: str = setting(..., "Scorer: a registered name, or an import path package.module:attribute.")
    weight: float = setting(1.0, "What its reward is multiplied by.")


class ScoreConfig(StageConfig):
    scorer: str = setting(
        "addition", "Scorer: a registered name, or an import path package.module:attribute.", fixed=True
    )
    sum: tuple[WeightedScorer, ...] = setting(
        (), "Scorers whose weighted rewards are added; when there are any, `scorer` is not used.", fixed=True
    )
    judge: JudgeConfig = setting(JudgeConfig(), "The LLM of the scorers judge and ruler.")
    reward_model: RewardModelConfig = setting(RewardModelConfig(), "The model of the scorer reward_model.")
    timeout_s: float = setting(60.0, "Seconds one call of a scorer may take; then it is ended.", gt=0.0)
    workers: int = setting(1, "Worker processes for scorers that compute.", ge=1)
    worker_start_timeout_s: float = setting(
        120.0, "Seconds until a new worker process must have imported its scorers.", gt=0.0
    )
    max_in_flight: int = setting(64, "Most calls of asynchronous scorers at the same time.", ge=1)
    advantage: str = setting(
        "mean",
        "Advantages: none (the reward), mean (reward minus the group's mean), mean_std (that over the deviation), rloo "
        "(minus the mean of the others), reinforce_pp (minus the mean, over the batch's deviation), or an import path "
        "package.module:function (docs/algorithms.md).",
        fixed=True,
    )
    overlong_limit_tokens: int = setting(
        0,
        "Sampled tokens from which on a trajectory loses a whole point of the reward that its advantage is taken of "
        "(DAPO's soft overlong punishment); 0: none does.",
        ge=0,
        fixed=True,
    )
    overlong_cache_tokens: int = setting(
        0,
        "Tokens below that limit over which the loss rises from 0 to the whole point.",
        ge=0,
        fixed=True,
    )
    train_truncated: bool = setting(
        True,
        "Train on trajectories that were cut for their length; false: they count in their group's baseline alone.",
        fixed=True,
    )
    needs_whole_group: bool = setting(
        False,
        "Leave a group out, unscored by a group's scorer, when a trajectory of it is missing.",
        fixed=True,
    )
    min_group_size: int = setting(
        2, "Fewest surviving trajectories of a group that is trained on.", ge=1, fixed=True
    )
