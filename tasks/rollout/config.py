"""Settings of sampling."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rollmill.tasks.config import ADDRESS, YEAR_S, StageConfig, VariablePattern, setting
from rollmill.tasks.errors import show_value
from rollmill.tasks.sandbox.config import SandboxConfig
from rollmill.tasks.user_code.plug_in import PlugIn

# Arguments of rendering that are no arguments of a template.
_RENDERING = (
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens", "tokenize", "tools"),
)

# Settings by which tokens are sampled from another distribution than softmax(logits / temperature), which is trained.
_ALTERING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "structured_output")
# Members of vLLM's `StructuredOutputsParams` that give a form, and the types of their values.
_FORMS: Mapping[str, type | tuple[type, ...]] = {
    "json": (dict, str),
    "regex": str,
    "choice": list,
    "grammar": str,
}
StopText = Annotated[str, Field(min_length=1)]


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
    license: str = setting(
        "",
        "Licence of the data set by its SPDX identifier, such as CC-BY-4.0, for the model card of exported policies; empty: not stated.",
    )
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


class SamplingConfig(StageConfig):
    """Settings of the sampler besides its temperature."""

    top_p: float = setting(
        1.0,
        "Sample from the fewest most probable tokens whose probabilities sum to at least this; 1: from all.",
        gt=0.0,
        le=1.0,
        fixed=True,
    )
    top_k: int = setting(
        0, "Sample from this many most probable tokens; 0: from all.", ge=0, le=2**31 - 1, fixed=True
    )
    min_p: float = setting(
        0.0,
        "Sample from tokens with at least this share of the most probable token's probability; 0: from all.",
        ge=0.0,
        le=1.0,
        fixed=True,
    )
    repetition_penalty: float = setting(
        1.0,
        "The logit of a token that prompt or completion already have is divided by this if it is positive, else multiplied; 1: none.",
        gt=0.0,
        le=10.0,
        fixed=True,
    )
    presence_penalty: float = setting(
        0.0,
        "Subtracted from the logit of a token that the completion already has; 0: none.",
        ge=-2.0,
        le=2.0,
        fixed=True,
    )
    stop: tuple[StopText, ...] = setting(
        (),
        "Texts, such as [</answer>], each of which ends a completion; its tokens stay in the trajectory as they were sampled.",
        fixed=True,
    )

    structured_output: str = setting(
        "",
        "Form of every completion, thoughts included: a JSON object with one of json (a JSON schema), regex, choice (a list of texts) "
        'and grammar (EBNF), such as {"regex": "[0-9]+"}; empty: any.',
        fixed=True,
    )

    @field_validator("structured_output", mode="before")
    @classmethod
    def _write_form(cls, given: object) -> object:
        return _write_object(given)

    @field_validator("structured_output")
    @classmethod
    def _check_form(cls, text: str) -> str:
        if text and (remedy := _find_wrong_form(text)):
            raise PydanticCustomError("form", "{remedy}", {"remedy": remedy})
        return text

    def list_altered(self) -> list[str]:
        """List the settings, with their values, by which tokens are sampled from another distribution than the trained one.

        Example: ["rollout.sampling.top_p = 0.9"].
        """
        return [f"rollout.sampling.{name} = {show_value(value)}" for name, value in self._altering().items()]

    def parameters(self) -> dict[str, object]:
        """Return the settings that differ from their defaults as fields of vLLM's `SamplingParams`."""
        found = self._altering()
        if form := found.pop("structured_output", ""):
            found["structured_outputs"] = json.loads(str(form))
        if self.stop:
            # vLLM looks for the texts in what it detokenizes, from which it leaves out special tokens by default.
            found |= {"stop": list(self.stop), "detokenize": True, "skip_special_tokens": False}
        return found

    def _altering(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in _ALTERING}
        return {
            name: value for name, value in values.items() if value != type(self).model_fields[name].default
        }


class ReplayConfig(StageConfig):
    """Settings of stored groups that steps train on again, mixed with those that they sample."""

    share: float = setting(
        0.0,
        "Share of a step's groups that are stored ones instead of newly sampled ones, as far as there are so many; 0: none.",
        ge=0.0,
        lt=1.0,
    )
    sources: tuple[str, ...] = setting(
        (),
        "Further runs whose groups are drawn, besides those of the run's own earlier steps: folders, or s3://bucket/prefix. They need "
        "scores by the run's scorer.",
        fixed=True,
    )
    where: str = setting(
        "",
        "Condition in SQL on the stored groups to draw from, such as `steps_ago <= 20 and replays < 2` (docs/how-to/rollouts.md has the "
        "columns); empty: all that can be trained on.",
    )
    order_by: str = setting(
        "",
        "Keys in SQL by which a step takes stored groups, such as `replays, reward_std desc`; empty: in random order.",
    )


class AgentConfig(StageConfig):
    """Settings of the environment `agent`."""

    command: str = setting(
        "",
        "Command that plays an episode, such as python my_agent.py. It gets the problem's messages as JSON on its standard input, and "
        "the endpoint and its key in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.",
        fixed=True,
    )
    url: str = setting(
        "",
        "Address of an HTTP service that plays an episode for each POST request {messages, base_url, api_key}; instead of `command`.",
        pattern=ADDRESS,
    )
    problems: PlugIn = setting(
        PlugIn(name="prompts"),
        "Environment whose problems the agent is given, as for `rollout.environment`.",
        fixed=True,
    )
    host: str = setting(
        "127.0.0.1",
        "Address of this machine at which endpoints listen; for agents on other machines, one that they reach.",
        min_length=1,
    )


class RolloutConfig(StageConfig):
    """Settings of rollouts: environment, groups, sampling and limits."""

    environment: PlugIn = setting(
        PlugIn(name="prompts"),
        "Environment: a registered name, an import path package.module:Class, or verifiers:NAME of the verifiers "
        "library. `prompts` asks the prompts of a data set, one turn each.",
        fixed=True,
        basic=True,
    )
    prompts: PromptsConfig = setting(PromptsConfig(), "The data set of the environment `prompts`.")
    agent: AgentConfig = setting(AgentConfig(), "The program of the environment `agent`.")
    sandbox: SandboxConfig = setting(
        SandboxConfig(),
        "The sandbox of the environment `shell`, and of your environments that open one.",
    )
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
    problem_weight: str = setting(
        "",
        "Number in SQL, for each training problem, to which the chance that a step draws it is proportional, such as "
        "coalesce(reward_std, 1) + 0.05; empty: each problem once an epoch. The columns are problem, visits, steps_ago, reward, "
        "reward_std and tokens, of the run's earlier steps; all but problem and visits are null before the problem's first visit.",
    )
    replay: ReplayConfig = setting(ReplayConfig(), "Stored groups in the steps.")
    longest_first: bool = setting(
        False,
        "Begin a step with the groups whose problems had the longest trajectories at earlier visits, so that fewer slots are idle at "
        "its end.",
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
    sampling: SamplingConfig = setting(SamplingConfig(), "How tokens are chosen.")
    max_staleness: int = setting(
        0,
        "Largest number of policy versions by which the first one of a trajectory may be behind the step that trains on it (also "
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
        "Worker processes of the environment; 0: it runs in the flow's process, but agent, openenv, nemo_gym and verifiers in one worker.",
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
        "PATH, HOME, LANG, CUDA_*, HF_*, PYTHON* and the like without secrets (docs/explanation/security.md). [*]: all.",
    )
    trajectory_timeout_s: float = setting(
        900.0,
        "Time limit of one trajectory, in seconds, including waits for a server; then it is cancelled.",
        gt=0.0,
        le=YEAR_S,
    )

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _write_arguments(cls, given: object) -> object:
        return _write_object(given)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_arguments(cls, text: str) -> str:
        arguments = _read_object(text or "{}")
        if arguments is None:
            raise PydanticCustomError("json", 'give a JSON object, such as {"enable_thinking": false}')
        if found := next((each for each in _RENDERING if each in arguments), ""):
            remedy = f"{found} is no argument of a template: Rollmill renders with its own; remove it"
            raise PydanticCustomError("reserved", "{remedy}", {"remedy": remedy})
        return text


def _write_object(given: object) -> object:
    """Return a mapping as JSON, anything else unchanged: YAML, and so --set, reads a JSON object as a mapping."""
    try:
        return json.dumps(given) if isinstance(given, dict) else given
    except (TypeError, ValueError):
        # One with dates or cycles is no JSON.
        return given


def _read_object(text: str) -> dict[str, object] | None:
    """Parse a JSON object; None for a text that is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _find_wrong_form(text: str) -> str:
    """Return what is wrong with the value of structured_output; empty if vLLM alone can tell whether it takes it."""
    form = _read_object(text)
    if form is None or len(form) != 1 or not form.keys() <= _FORMS.keys():
        return f'give a JSON object with one of {", ".join(_FORMS)}, such as {{"regex": "[0-9]+"}}'
    ((kind, value),) = form.items()
    is_empty = not (value.strip() if isinstance(value, str) else value)
    if not isinstance(value, _FORMS[kind]) or is_empty:
        return (
            f"{kind} is empty or of another type: give a JSON schema, a list of texts for choice, or a text"
        )
    if isinstance(value, list) and not all(isinstance(each, str) and each for each in value):
        return "choice is not a list of texts"
    return _find_wrong_schema(value) if kind == "json" else ""


def _find_wrong_schema(value: object) -> str:
    # Its import takes a while, and hardly any run needs it.
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = json.loads(value) if isinstance(value, str) else value
        validator_for(schema, Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        return f"json is no JSON schema: {error.message} (at {error.json_path})"
    except (ValueError, RecursionError) as error:
        return f"json cannot be read: {error}"
    return ""
