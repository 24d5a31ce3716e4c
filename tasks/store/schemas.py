"""The data sets' schemas, in one place: every column with its unit and shape.

A shard of a data set has exactly its schema: a missing, extra or null-typed column in one shard would
break a plain scan over all of them. Axes: P prompts, G group, T tokens.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rollmill.tasks.errors import SchemaError

SCHEMA_VERSION = 5
# Statuses of rollouts that are scored.
SCORABLE_STATUSES = ("complete", "truncated")
# Statuses of rollouts without a result; they are sampled again only when a user asks for it.
LOST_STATUSES = ("failed", "cancelled")

_INT64_LIST = pa.large_list(pa.int64())
_INT32_LIST = pa.large_list(pa.int32())
_FLOAT32_LIST = pa.large_list(pa.float32())
_FLOAT64_LIST = pa.large_list(pa.float64())


def _column(
    name: str,
    kind: pa.DataType,
    meaning: str,
    *,
    unit: str = "",
    shape: str = "",
) -> pa.Field:
    texts = {"meaning": meaning, "unit": unit, "shape": shape}
    return pa.field(name, kind, nullable=False, metadata={key: text for key, text in texts.items() if text})


def _schema(name: str, *columns: pa.Field) -> pa.Schema:
    return pa.schema(columns, metadata={"dataset": name, "schema_version": str(SCHEMA_VERSION)})


_RUN = _column("run", pa.string(), "random id of the run, from run.json")
_STEP = _column("step", pa.int32(), "step, from 0")
_GROUP = _column("group", pa.int64(), "global number of the group, from 0")
_SAMPLE = _column("sample", pa.int32(), "number of the trajectory in its group, 0 <= sample < G")
_TRAJECTORY = _column("trajectory_id", pa.string(), "id, a function of (run, group, sample, attempt)")
_SUBGROUP = _column(
    "subgroup",
    pa.int32(),
    "subset of the group whose rewards the advantage is relative to; 0 unless a scorer split the group",
)
_ENV = _column("env", pa.string(), "environment")
_DURATION = _column("duration_s", pa.float64(), "duration from start to end", unit="s")
_ERROR_TYPE = _column("error_type", pa.string(), "class of the error; empty when there is none")
_ERROR = _column("error", pa.large_string(), "text of the error; empty when there is none")

_SAMPLED = (
    _column(
        "attempt",
        pa.int32(),
        "attempt, from 0; rises only when a user asks to sample failed trajectories again",
    ),
    _TRAJECTORY,
    _ENV,
    _column("example_id", pa.string(), "the environment's id of the problem"),
    _column("example", pa.large_string(), "JSON: what a scorer may read, including the reference answer"),
    _column("temperature", pa.float32(), "sampling temperature"),
    _column("sampling_seed", pa.int64(), "seed of the sampler"),
    _column("status", pa.string(), "complete | truncated | failed | cancelled"),
    _ERROR_TYPE,
    _ERROR,
    _column(
        "policy_version_first", pa.int32(), "policy version of the first sampled token; -1: none sampled"
    ),
    _column("policy_version_last", pa.int32(), "policy version of the last sampled token; -1: none sampled"),
    _column(
        "version_span_starts",
        _INT32_LIST,
        "index into token_ids where a span of one policy version begins",
        shape="[S]",
    ),
    _column("version_span_versions", _INT32_LIST, "policy version of each span", shape="[S]"),
    _column(
        "messages",
        pa.large_string(),
        "JSON: the conversation as a list of {role, content}, and where set name, tool_call_id, tool_calls; of several "
        "segments in the order in which it was said, messages that a segment inherits left out",
    ),
    _column(
        "message_segments",
        _INT32_LIST,
        "segment of each message; empty: all are of segment 0",
        shape="[messages]",
    ),
    _column(
        "segment_starts",
        _INT32_LIST,
        "index into token_ids where the own tokens of a segment begin; one segment, from 0, unless context was dropped or "
        "rewritten",
        shape="[K]",
    ),
    _column(
        "segment_parents",
        _INT32_LIST,
        "number of the earlier segment whose first tokens it inherits; -1: none",
        shape="[K]",
    ),
    _column(
        "segment_prefix_tokens",
        _INT32_LIST,
        "tokens that it inherits: the first ones of its parent's whole sequence, what that inherits included",
        unit="tokens",
        shape="[K]",
    ),
    _column(
        "segment_prefix_messages",
        _INT32_LIST,
        "messages that it inherits: the first ones of its parent's conversation",
        shape="[K]",
    ),
    _column(
        "token_ids",
        _INT32_LIST,
        "tokens of the prompt, the completions, and the environment's messages between them; segment by segment, "
        "those that a segment inherits left out",
        shape="[T]",
    ),
    _column("loss_mask", pa.large_list(pa.bool_()), "True on tokens that the policy sampled", shape="[T]"),
    _column(
        "logprobs",
        _FLOAT32_LIST,
        "log-probabilities by the sampler of the tokens as sampled; NaN where loss_mask is False",
        unit="nats",
        shape="[T]",
    ),
    _column(
        "outcome",
        pa.large_string(),
        "JSON: what the environment reports about the end of the episode; {} for nothing",
    ),
    _column("n_prompt_tokens", pa.int32(), "tokens before the first sampled one", unit="tokens"),
    _column("n_completion_tokens", pa.int32(), "sampled tokens", unit="tokens"),
    _column(
        "finish_reason",
        pa.string(),
        "reported by the sampler: stop | length | abort; empty without a response",
    ),
    _column("turns", pa.int32(), "completions of the episode"),
    _column(
        "turn_starts",
        _INT32_LIST,
        "index into token_ids of the first token of each completion, in the order in which they were sampled; empty in rows "
        "that schema 2 stored",
        shape="[turns]",
    ),
    _column("turn_tokens", _INT32_LIST, "sampled tokens of each completion", unit="tokens", shape="[turns]"),
    _column("turn_messages", _INT32_LIST, "index into messages of each completion", shape="[turns]"),
    _column("server", pa.string(), "address of the server that sampled it"),
    _column("started_at", pa.timestamp("us", tz="UTC"), "when sampling began", unit="us, UTC"),
    _DURATION,
    _column("generate_s", pa.float64(), "part of duration_s spent waiting for the sampler", unit="s"),
    _column("environment_s", pa.float64(), "part of duration_s spent in the environment", unit="s"),
    _column("queue_s", pa.float64(), "time from the start of its group to its own start", unit="s"),
)

_SCORED = (
    _column("scorer", pa.string(), "name of the scorer"),
    _column(
        "version",
        pa.string(),
        "the scorer's declared version, else 1; of other arguments than the defaults -DIGEST follows, which `scorers` of run.json explains",
    ),
    _column("status", pa.string(), "scored | failed | dropped"),
    _ERROR_TYPE,
    _ERROR,
    _column("reward", pa.float64(), "reward; NaN unless scored"),
    _column(
        "turn_rewards",
        _FLOAT64_LIST,
        "reward of each completion, if the scorer gave one for each",
        shape="[turns] or [0]",
    ),
    _column(
        "token_rewards",
        _FLOAT64_LIST,
        "reward of each sampled token in the order in which they were sampled, if the scorer gave one for each",
        shape="[n_completion_tokens] or [0]",
    ),
    _column(
        "components",
        pa.large_string(),
        "JSON: {name: number} of the components that the scorer gave, of a weighted sum {scorer: weighted reward}; {} for none",
    ),
    _SUBGROUP,
    _column("duration_s", pa.float64(), "duration of scoring", unit="s"),
)

SCHEMAS: Mapping[str, pa.Schema] = {
    "plans": _schema(
        "plans",
        _RUN,
        _STEP,
        _column("first_group", pa.int64(), "first group number of the range"),
        _column("n_groups", pa.int32(), "groups in the range"),
        _column(
            "reason", pa.string(), "plan | refill | replay: a stored group takes the place of a planned one"
        ),
        _column(
            "problems",
            _INT64_LIST,
            "index of each group's problem among the training problems of its environment, if rollout.problem_weight chose it; else "
            "empty: it follows from the group's number",
            shape="[n_groups] or [0]",
        ),
        _column("source", pa.string(), "of replay: folder of the run that stores the group; empty: this run"),
        _column("source_step", pa.int32(), "of replay: step under which the group is stored; else -1"),
        _column("source_group", pa.int64(), "of replay: number of the group there; else -1"),
    ),
    "rollouts": _schema("rollouts", _RUN, _STEP, _GROUP, _SAMPLE, *_SAMPLED),
    "routing": _schema(
        "routing",
        _RUN,
        _STEP,
        _TRAJECTORY,
        _column("shape", _INT32_LIST, "shape of experts: tokens, layers, experts per token", shape="[3]"),
        _column("dtype", pa.string(), "numpy name of the element type"),
        _column("experts", pa.large_binary(), "routed experts, raw bytes, little-endian, in C order"),
    ),
    "scores": _schema("scores", _RUN, _STEP, _GROUP, _SAMPLE, _TRAJECTORY, *_SCORED),
    "evaluation_scores": _schema("evaluation_scores", _RUN, _STEP, _GROUP, _SAMPLE, _TRAJECTORY, *_SCORED),
    "groups": _schema(
        "groups",
        _RUN,
        _STEP,
        _GROUP,
        _SUBGROUP,
        _ENV,
        _column("expected", pa.int32(), "trajectories asked for (G)"),
        _column("survived", pa.int32(), "trajectories with a reward"),
        _column("reason", pa.string(), "why the group is not in the batch; empty if it is"),
        _column("reward_mean", pa.float64(), "mean reward of the survivors; NaN without any"),
        _column(
            "reward_std", pa.float64(), "population standard deviation of their rewards; NaN without any"
        ),
        _column(
            "tokens_mean",
            pa.float64(),
            "mean sampled tokens of the survivors; NaN without any",
            unit="tokens",
        ),
        _column(
            "duration_s",
            pa.float64(),
            "duration from the group's start until its last row is stored",
            unit="s",
        ),
    ),
    "batches": _schema(
        "batches",
        _RUN,
        _STEP,
        _column("order", pa.int32(), "position in the batch, from 0"),
        _TRAJECTORY,
        _GROUP,
        _SAMPLE,
        _ENV,
        _column(
            "advantage",
            pa.float32(),
            "advantage of every sampled token of the trajectory; their mean where they differ",
        ),
        _column(
            "token_advantages",
            _FLOAT32_LIST,
            "advantage of each sampled token in the order of token_ids, with score.credit turn or token",
            shape="[n_completion_tokens] or [0]",
        ),
        _column(
            "reward",
            pa.float64(),
            "reward of the trajectory; with score.credit turn or token the advantages are from those of its turns or tokens",
        ),
        _column("source", pa.string(), "run folder that holds the rollout; empty: this run"),
        _column("source_step", pa.int32(), "step under which the rollout is stored"),
        _column("scorer", pa.string(), "NAME@VERSION of the scorer of the reward"),
    ),
    "logprobs": _schema(
        "logprobs",
        _RUN,
        _STEP,
        _TRAJECTORY,
        _column(
            "model",
            pa.string(),
            "policy that computed them: run:incarnation:version, or a model's name; of a teacher NAME@DIGEST, the digest of its weights",
        ),
        _column(
            "logprobs",
            _FLOAT32_LIST,
            "log-probabilities of the tokens as sampled, at the rollout's temperature; NaN where loss_mask is False",
            unit="nats",
            shape="[T]",
        ),
    ),
    "annotations": _schema(
        "annotations",
        _RUN,
        _STEP,
        _TRAJECTORY,
        _column(
            "logprobs",
            _FLOAT32_LIST,
            "log-probabilities by the trainer of the tokens as sampled; NaN where loss_mask is False",
            unit="nats",
            shape="[T]",
        ),
        _column(
            "entropy",
            _FLOAT32_LIST,
            "entropy of the trainer's distribution; NaN where loss_mask is False",
            unit="nats",
            shape="[T]",
        ),
        _column(
            "ratio",
            _FLOAT32_LIST,
            "probability ratio in the loss, p_policy / p_old; NaN where loss_mask is False",
            shape="[T]",
        ),
        _column("clipped", pa.large_list(pa.bool_()), "True where the loss was clipped", shape="[T]"),
    ),
    "evaluations": _schema(
        "evaluations",
        _RUN,
        _STEP,
        _GROUP,
        _SAMPLE,
        *_SAMPLED,
        _column("policy_version", pa.int32(), "policy version evaluated"),
        _column("greedy", pa.bool_(), "True: temperature 0; False: sampled"),
        _column("reward", pa.float64(), "reward; NaN when it could not be scored"),
        _column("components", pa.large_string(), "components, as in scores; {} without a score"),
    ),
    "metrics": _schema(
        "metrics",
        _RUN,
        _STEP,
        _column("name", pa.string(), "stage/metric, with its unit as suffix"),
        _column("env", pa.string(), "environment, or all"),
        _column("stat", pa.string(), "value | mean | std | min | max"),
        _column("value", pa.float64(), "value"),
    ),
    "spans": _schema(
        "spans",
        _RUN,
        _column("step", pa.int32(), "step that it belongs to; -1 for none"),
        _column("process", pa.string(), "flow | trainer/RANK | a server's address"),
        _column(
            "lane", pa.string(), "line of control in the process: step, main, or a trajectory as GROUP.SAMPLE"
        ),
        _column("name", pa.string(), "what was done; time belongs to the innermost of nested spans"),
        _column("cause", pa.string(), "for a wait, the name of what it waited for; else empty"),
        _column("started_at", pa.timestamp("us", tz="UTC"), "when it began", unit="us, UTC"),
        _DURATION,
    ),
    "shards": _schema(
        "shards",
        _RUN,
        _column("epoch", pa.int32(), "epoch of the writer that recorded it"),
        _column("shard", pa.string(), "path of a shard below the run's folder"),
        _column("event", pa.string(), "written | removed"),
        _column("rows", pa.int64(), "rows of the shard"),
        _column("bytes", pa.int64(), "size of the shard", unit="bytes"),
    ),
}


# Columns of every environment's states; the environment's own columns follow.
STATE_FIELDS: tuple[pa.Field, ...] = (
    _RUN,
    _STEP,
    _GROUP,
    _SAMPLE,
    _TRAJECTORY,
    _column(
        "error",
        pa.large_string(),
        "why values are null that the environment should have given; empty if none is",
    ),
)


def states_schema(env: str, columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """Build the schema of one environment's data set `states`; the columns of the environment are nullable."""
    own = [pa.field(name, kind) for name, kind in columns.items()]
    return _schema("states", *STATE_FIELDS, *own).with_metadata(
        {"dataset": "states", "schema_version": str(SCHEMA_VERSION), "env": env}
    )


def schema_like(dataset: str, given: pa.Schema) -> pa.Schema:
    """Return the schema for rows of a data set; for `states` it is `given`, which must begin with STATE_FIELDS.

    Raises:
        SchemaError: unknown data set, or a schema for `states` that does not begin with STATE_FIELDS.
    """
    if dataset != "states":
        return dataset_schema(dataset)
    if list(given)[: len(STATE_FIELDS)] != list(STATE_FIELDS):
        raise SchemaError(f"states: rows begin with {', '.join(each.name for each in STATE_FIELDS)}")
    return given


def dataset_schema(dataset: str) -> pa.Schema:
    """Return the schema of a data set; raises SchemaError for an unknown name."""
    try:
        return SCHEMAS[dataset]
    except KeyError:
        raise SchemaError(
            f"no data set is called {dataset!r}; there are {', '.join(sorted(SCHEMAS))}"
        ) from None


def make_batch(dataset: str, columns: Mapping[str, object]) -> pa.RecordBatch:
    """Build rows of a data set from one sequence or Arrow array per column.

    Example: make_batch("plans", {"run": ["ab"], "step": [0], "first_group": [0], "n_groups": [32], "reason": ["plan"]})

    Raises:
        SchemaError: columns are missing, unknown, of the wrong type or of unequal length.
    """
    schema, kinds = dataset_schema(dataset), _kinds(dataset)
    if missing := set(kinds) ^ set(columns):
        raise SchemaError(f"{dataset}: columns missing or unknown: {', '.join(sorted(missing))}")
    try:
        arrays = _arrays(dataset, columns)
        batch = pa.record_batch([arrays[name] for name in kinds], schema=schema)
        batch.validate()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SchemaError(f"{dataset}: rows do not fit the schema: {error}") from error
    check_nulls(dataset, batch)
    return batch


def check_nulls(dataset: str, rows: pa.RecordBatch) -> None:
    """Check that no value of a non-nullable column is null; raises SchemaError."""
    # One call of Arrow's for the usual rows without a null: looking at each column takes longer than making it.
    if pc.drop_null(rows).num_rows == rows.num_rows:
        return
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if column.null_count and not field.nullable:
            raise SchemaError(f"{dataset}.{field.name}: {column.null_count} of {len(column)} values are null")


@cache
def _kinds(dataset: str) -> Mapping[str, pa.DataType]:
    """Return the Arrow type of each column of a data set, by the column's name, in order."""
    return {field.name: field.type for field in dataset_schema(dataset)}


def _arrays(dataset: str, columns: Mapping[str, object]) -> dict[str, pa.Array]:
    """Convert columns to Arrow arrays, by name; all columns of Python lists are converted in one call of Arrow.

    A call takes several microseconds even for one value, and most rows are made one by one.
    """
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    kinds = _kinds(dataset)
    arrays = {name: _array(values, kinds[name]) for name, values in columns.items() if name not in lists}
    if lists:
        rows = pa.array(list(zip(*lists.values(), strict=True)), _struct(dataset, tuple(lists)))
        arrays |= dict(zip(lists, rows.flatten(), strict=True))
    return arrays


@cache
def _struct(dataset: str, names: tuple[str, ...]) -> pa.StructType:
    """Return an Arrow struct type of some columns of a data set; cached, since callers repeat the same columns."""
    return pa.struct([(name, _kinds(dataset)[name]) for name in names])


def _array(values: object, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        return pa.array(values, kind)
    return values if values.type == kind else values.cast(kind)


def ragged_array(arrays: list[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Wrap one array per row as a list column, without a Python object for each element.

    Example: ragged_array([np.array([1, 2]), np.array([3])], pa.large_list(pa.int32())) is [[1, 2], [3]].
    """
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.empty(0)
    values = _array(pa.array(flat), kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=kind)
