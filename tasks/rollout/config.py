"""Settings of sampling."""

import json
from typing import Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from rollmill.tasks.config import YEAR_S, StageConfig, VariablePattern, setting

# Arguments of rendering that are no arguments of a template.
_RENDERING = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens", "tokenize", "tools"),
)


class PromptsConfig(StageConfig):
    """Settings of the environment `prompts`."""

    path: str = setting(
        "",
        "Prompts: a .jsonl or .parquet file, a folder of .parquet files, a folder saved by the library `datasets`, or the "
        "name of a Hugging Face data set (with format huggingface).",
        fixed=True,
        basic=True,
    )
    prompt_column: str = setting(
        "prompt",
        "Column with the prompt: a text, or a list of messages {role, content}.",
        fixed=True,
        basic=True,
    )
    answer_column: str = setting(
        "answer", "Column with the reference answer; empty: none.", fixed=True, basic=True
    )
    answer_pattern: str = setting(
        "",
        "Regular expression whose first group is the answer within that column; empty: the whole column.",
        fixed=True,
    )
    columns: tuple[str, ...] = setting((), "Further columns that scorers can read.", fixed=True)
    system: str = setting("", "System prompt for every prompt; empty: none.", fixed=True)
    held_out_path: str = setting(
        "", "File or folder with the held-out prompts; empty: they are split off `path`.", fixed=True
    )
    format: Literal["", "jsonl", "parquet", "huggingface"] = setting(
        "", "Format of `path` and `held_out_path`; empty: from the file name.", fixed=True
    )
    subset: str = setting(
        "", "Configuration name of a Hugging Face data set; empty: its default.", fixed=True
    )
    split_column: str = setting(
        "",
        "Column with the name of the split; empty: `held_out_share` of the prompts, chosen by their crc32, is held out.",
        fixed=True,
    )
    train_split: str = setting(
        "train", "Name of the training split, in `split_column` or in the Hugging Face data set.", fixed=True
    )
    held_out_split: str = setting(
        "",
        "Name of the held-out split; empty: all rows outside of `train_split`, or a share of a Hugging Face data set.",
        fixed=True,
    )
    held_out_share: float = setting(
        0.1,
        "Share of the prompts that is held out when no file or split is given.",
        gt=0.0,
        lt=1.0,
        fixed=True,
    )


class RolloutConfig(StageConfig):
    """Settings of rollouts: environment, groups, sampling and limits."""

    environment: str = setting(
        "prompts",
        "Environment: a registered name, an import path package.module:Class, or verifiers:NAME of the verifiers "
        "library. `prompts` asks the prompts of a data set, one turn each.",
        fixed=True,
        basic=True,
    )
    environment_args: str = setting(
        "",
        'Arguments of a verifiers environment: a JSON object, such as {"taskset": {"split": "train"}}.',
        fixed=True,
    )
    prompts: PromptsConfig = setting(PromptsConfig(), "The data set of the environment `prompts`.")
    chat_template: str = setting(
        "",
        "Chat template (Jinja): the path of a file or, with a brace, the template itself; launched vLLM servers get it too. Empty: the "
        "model's.",
        fixed=True,
    )
    chat_template_kwargs: str = setting(
        "",
        'Arguments of the chat template: a JSON object, such as {"enable_thinking": false}; launched vLLM servers get them too.',
        fixed=True,
    )
    groups_per_step: int = setting(
        32,
        "Prompts (groups) of one step; for training from stored rollouts, the stored groups that a step draws.",
        ge=1,
        fixed=True,
        basic=True,
    )
    group_size: int = setting(
        8, "Trajectories that are sampled for each prompt.", ge=1, fixed=True, basic=True
    )
    max_prompt_tokens: int = setting(
        0,
        "Largest number of tokens of a prompt: the messages before the policy's first one; 0: as many as fit into "
        "serve.max_model_len.",
        ge=0,
        fixed=True,
    )
    long_prompts: Literal["fail", "drop", "keep_end"] = setting(
        "fail",
        "What becomes of a longer prompt. fail: its trajectories fail, and count for max_failed_share. drop: they fail, and do not "
        "count. keep_end: its last max_prompt_tokens tokens are used.",
        fixed=True,
    )
    max_completion_tokens: int = setting(
        1024, "Largest number of tokens of one completion.", ge=1, fixed=True, basic=True
    )
    # vLLM raises lower temperatures to 0.01, and the trainer would divide the logits by another number than the sampler.
    temperature: float = setting(1.0, "Sampling temperature.", ge=0.01, le=10.0, fixed=True, basic=True)
    max_staleness: int = setting(
        0,
        "Largest number of policy versions from the one that began a trajectory to the step that trains on it (also "
        "called async level); 0: strictly on-policy.",
        ge=0,
        fixed=True,
        basic=True,
    )
    max_refill_groups: int = setting(
        0,
        "Largest number of groups that a step samples to replace groups that cannot be trained on (dynamic sampling); "
        "0: none.",
        ge=0,
        fixed=True,
    )
    max_in_flight: int = setting(256, "Largest number of trajectories that are sampled concurrently.", ge=1)
    max_failed_share: float = setting(
        0.5,
        "Largest share of a step's trajectories that may fail in sampling or scoring; above it the run stops.",
        ge=0.0,
        le=1.0,
    )
    keep_routing: bool = setting(
        False,
        "Store the experts that each token was routed to (mixture-of-experts models served on GPUs; large, see "
        "store.keep_routing_steps).",
        fixed=True,
    )
    keep_states: tuple[str, ...] = setting(
        (),
        "State of a verifiers environment to store: NAME:TYPE each (int64, float64, bool, string, list<int64>, ...); "
        "without a type: its JSON as string.",
        fixed=True,
    )
    trajectories_per_task: int = setting(
        0,
        "Trajectories of a group that one rollout task run and its score task run hold; 0: the whole group.",
        ge=0,
    )
    env_workers: int = setting(
        0,
        "Worker processes of the environment; 0: it runs in the flow's process, a verifiers environment in one worker.",
        ge=0,
        le=4096,
    )
    env_timeout_s: float = setting(
        60.0,
        "Time limit of one call of an environment in a worker process, in seconds; a worker that does not answer is "
        "restarted.",
        gt=0.0,
        le=YEAR_S,
    )
    env_worker_max_episodes: int = setting(
        0, "Episodes after which a worker process is replaced, against memory leaks; 0: never.", ge=0
    )
    env_variables: tuple[VariablePattern, ...] = setting(
        (),
        "Further environment variables for worker processes of environments and scorers, such as [MY_API_KEY,MY_*]; they have "
        "PATH, HOME, LANG, CUDA_*, HF_*, PYTHON* and the like without secrets (docs/security.md). [*]: all.",
    )
    trajectory_timeout_s: float = setting(
        900.0,
        "Time limit of one trajectory, in seconds, including waits for a server; then it is cancelled.",
        gt=0.0,
        le=YEAR_S,
    )

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _write_template_arguments(cls, given: object) -> object:
        # YAML, and so --set, reads a JSON object as a mapping; one with dates or cycles is none.
        try:
            return json.dumps(given) if isinstance(given, dict) else given
        except (TypeError, ValueError):
            return given

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_arguments(cls, text: str) -> str:
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise PydanticCustomError("json", 'give a JSON object, such as {"enable_thinking": false}')
        if found := next((each for each in _RENDERING if each in arguments), ""):
            remedy = f"{found} is no argument of a template: Rollmill renders with its own; remove it"
            raise PydanticCustomError("reserved", "{remedy}", {"remedy": remedy})
        return text
