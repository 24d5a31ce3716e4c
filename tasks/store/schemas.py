"""The data sets' schemas, in one place: every column with its unit and shape.

A shard of a data set has exactly its schema: a missing, extra or null-typed column in one shard would
break a plain scan over all of them. Axes: P prompts, G group, T tokens.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.errors import SchemaError

SCHEMA_VERSION = 2

_INT32_LIST = pa.large_list(pa.int32())
_FLOAT32_LIST = pa.large_list(pa.float32())


def _column(
    name: str,
    kind: pa.DataType,
    meaning: str,
    *,
    unit: str = "",
    shape: str = "",
    since: int = 1,
    default: str = "",
) -> pa.Field:
    """A column; `default`, as text, is what it is in shards of schema versions before `since`."""
    told = {"meaning": meaning, "unit": unit, "shape": shape, "since": str(since), "default": default}
    return pa.field(name, kind, nullable=False, metadata={key: text for key, text in told.items() if text})


def _schema(name: str, *columns: pa.Field) -> pa.Schema:
    return pa.schema(columns, metadata={"dataset": name, "schema_version": str(SCHEMA_VERSION)})


_RUN = _column("run", pa.string(), "random id of the run, from run.json")
_STEP = _column("step", pa.int32(), "step, from 0")
_GROUP = _column("group", pa.int64(), "global number of the group, from 0")
_SAMPLE = _column("sample", pa.int32(), "number of the trajectory in its group, 0 <= sample < G")
_TRAJECTORY = _column("trajectory_id", pa.string(), "function of (run, group, sample, attempt)")
_SUBGROUP = _column(
    "subgroup",
    pa.int32(),
    "part of the group in which the advantage is taken; 0 unless a scorer split the group",
)
_ERROR_TYPE = _column("error_type", pa.string(), "class of the error; empty when there is none")
_ERROR = _column("error", pa.large_string(), "text of the error; empty when there is none")

_SAMPLED = (
    _column("attempt", pa.int32(), "rises only when a user asks to redo failed trajectories"),
    _TRAJECTORY,
    _column("env", pa.string(), "environment"),
    _column("example_id", pa.string(), "the environment's name for the problem"),
    _column("example", pa.large_string(), "JSON: all that a scorer may read, the reference answer included"),
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
        "JSON: the conversation as a list of {role, content}, and where set name, tool_call_id, tool_calls",
    ),
    _column(
        "token_ids",
        _INT32_LIST,
        "prompt, completions and what the environment said between them",
        shape="[T]",
    ),
    _column("loss_mask", pa.large_list(pa.bool_()), "True on tokens that the policy sampled", shape="[T]"),
    _column(
        "logprobs",
        _FLOAT32_LIST,
        "the sampler's, of the tokens as sampled; NaN where loss_mask is False",
        unit="nats",
        shape="[T]",
    ),
    _column(
        "outcome",
        pa.large_string(),
        "JSON: what the environment says of how the episode ended; {} for nothing",
    ),
    _column("n_prompt_tokens", pa.int32(), "tokens before the first sampled one", unit="tokens"),
    _column("n_completion_tokens", pa.int32(), "sampled tokens", unit="tokens"),
    _column(
        "finish_reason", pa.string(), "the sampler's: stop | length | abort; empty when nothing came back"
    ),
    _column("turns", pa.int32(), "completions of the episode"),
    _column("server", pa.string(), "address of the server that sampled it"),
    _column("started_at", pa.timestamp("us", tz="UTC"), "when sampling began", unit="us, UTC"),
    _column("duration_s", pa.float64(), "from start to end", unit="s"),
    _column(
        "generate_s", pa.float64(), "part of duration_s spent waiting for the sampler's answers", unit="s"
    ),
    _column("environment_s", pa.float64(), "part of duration_s spent in the environment", unit="s"),
    _column("queue_s", pa.float64(), "between its group's start and its own", unit="s"),
)

_SCORED = (
    _column("scorer", pa.string(), "name of the scorer"),
    _column("version", pa.string(), "the scorer's declared version, else 1"),
    _column("status", pa.string(), "scored | failed | dropped"),
    _ERROR_TYPE,
    _ERROR,
    _column("reward", pa.float64(), "reward; NaN unless scored"),
    _column(
        "components", pa.large_string(), "JSON: {part: reward} of a weighted sum; {} when it has no parts"
    ),
    _SUBGROUP,
    _column("duration_s", pa.float64(), "of scoring", unit="s"),
)

SCHEMAS: Mapping[str, pa.Schema] = {
    "plans": _schema(
        "plans",
        _RUN,
        _STEP,
        _column("first_group", pa.int64(), "first group number of the range"),
        _column("n_groups", pa.int32(), "groups in the range"),
        _column("reason", pa.string(), "plan | refill"),
    ),
    "rollouts": _schema("rollouts", _RUN, _STEP, _GROUP, _SAMPLE, *_SAMPLED),
    "routing": _schema(
        "routing",
        _RUN,
        _STEP,
        _TRAJECTORY,
        _column("shape", _INT32_LIST, "of experts: tokens, layers, experts a token", shape="[3]"),
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
        _column("env", pa.string(), "environment"),
        _column("expected", pa.int32(), "trajectories asked for (G)"),
        _column("survived", pa.int32(), "trajectories with a reward"),
        _column("reason", pa.string(), "why the group is out of the batch; empty when it is in"),
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
        _column("duration_s", pa.float64(), "from the group's start to its last acknowledgement", unit="s"),
    ),
    "batches": _schema(
        "batches",
        _RUN,
        _STEP,
        _column("order", pa.int32(), "place in the batch, from 0"),
        _TRAJECTORY,
        _GROUP,
        _SAMPLE,
        _column("env", pa.string(), "environment"),
        _column("advantage", pa.float32(), "advantage of every sampled token of the trajectory"),
        _column("reward", pa.float64(), "reward that the advantage comes from"),
        _column("source", pa.string(), "run folder that holds the rollout; empty: this run"),
        _column("source_step", pa.int32(), "step under which the rollout is stored"),
        _column("scorer", pa.string(), "NAME@VERSION of the scores that the reward comes from", since=2),
    ),
    "logprobs": _schema(
        "logprobs",
        _RUN,
        _STEP,
        _TRAJECTORY,
        _column("model", pa.string(), "whose they are: run:incarnation:version, or a model's name"),
        _column(
            "logprobs",
            _FLOAT32_LIST,
            "of the tokens as sampled, at the rollout's temperature; NaN where loss_mask is False",
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
            "the trainer's, of the tokens as sampled; NaN where loss_mask is False",
            unit="nats",
            shape="[T]",
        ),
        _column(
            "entropy",
            _FLOAT32_LIST,
            "of the trainer's distribution; NaN where loss_mask is False",
            unit="nats",
            shape="[T]",
        ),
        _column(
            "ratio",
            _FLOAT32_LIST,
            "probability ratio that the loss went by, policy's over old policy's; NaN where loss_mask is False",
            shape="[T]",
        ),
        _column(
            "clipped", pa.large_list(pa.bool_()), "True where a bound of the loss took hold", shape="[T]"
        ),
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
        _column("components", pa.large_string(), "JSON: {part: reward}"),
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
        _column("step", pa.int32(), "step that it was done for; -1 for none"),
        _column("process", pa.string(), "flow | trainer/RANK | a server's address"),
        _column(
            "lane", pa.string(), "one line of control in it: step, main, or a trajectory as GROUP.SAMPLE"
        ),
        _column("name", pa.string(), "what was done; of nested spans of a lane the innermost is the owner"),
        _column("cause", pa.string(), "of a wait, the name of what it was for; else empty"),
        _column("started_at", pa.timestamp("us", tz="UTC"), "when it began", unit="us, UTC"),
        _column("duration_s", pa.float64(), "from start to end", unit="s"),
    ),
    "shards": _schema(
        "shards",
        _RUN,
        _column("epoch", pa.int32(), "epoch of the writer that noted it", since=2),
        _column("shard", pa.string(), "path of a shard below the run's folder", since=2),
        _column("event", pa.string(), "written | removed", since=2),
        _column("rows", pa.int64(), "rows of the shard", since=2),
        _column("bytes", pa.int64(), "its size", unit="bytes", since=2),
    ),
}


STATE_FIELDS: tuple[pa.Field, ...] = (
    _RUN,
    _STEP,
    _GROUP,
    _SAMPLE,
    _TRAJECTORY,
    _column(
        "error", pa.large_string(), "why values are null that the environment should have given; empty: none"
    ),
)
"""What every environment's states have; its own columns follow."""


def states_schema(env: str, columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """The schema of the data set `states` of one environment, whose own columns may be null."""
    own = [pa.field(name, kind) for name, kind in columns.items()]
    return _schema("states", *STATE_FIELDS, *own).with_metadata(
        {"dataset": "states", "schema_version": str(SCHEMA_VERSION), "env": env}
    )


def schema_like(dataset: str, given: pa.Schema) -> pa.Schema:
    """The schema that rows of a data set must have, given theirs: of `states` any that begins with STATE_FIELDS.

    Raises:
        SchemaError: unknown data set, or rows of `states` that do not begin so.
    """
    if dataset != "states":
        return schema_of(dataset)
    if list(given)[: len(STATE_FIELDS)] != list(STATE_FIELDS):
        raise SchemaError(f"states: rows begin with {', '.join(each.name for each in STATE_FIELDS)}")
    return given


def schema_of(dataset: str) -> pa.Schema:
    """The schema of a data set; raises SchemaError for an unknown name."""
    try:
        return SCHEMAS[dataset]
    except KeyError:
        raise SchemaError(
            f"no data set is called {dataset!r}; there are {', '.join(sorted(SCHEMAS))}"
        ) from None


def batch_of(dataset: str, columns: Mapping[str, object]) -> pa.RecordBatch:
    """Build rows of a data set from one sequence or Arrow array a column.

    Example: batch_of("plans", {"run": ["ab"], "step": [0], "first_group": [0], "n_groups": [32], "reason": ["plan"]})

    Raises:
        SchemaError: columns are missing, unknown, of the wrong type or of unequal length.
    """
    schema, kinds = schema_of(dataset), _kinds(dataset)
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
    """Raise SchemaError when a value is null that may not be."""
    # One call of Arrow's for the usual rows without a null: looking at each column takes longer than making it.
    if pc.drop_null(rows).num_rows == rows.num_rows:
        return
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if column.null_count and not field.nullable:
            raise SchemaError(f"{dataset}.{field.name}: {column.null_count} of {len(column)} values are null")


@cache
def _kinds(dataset: str) -> Mapping[str, pa.DataType]:
    """The type of each column of a data set, by its name, in order."""
    return {field.name: field.type for field in schema_of(dataset)}


def _arrays(dataset: str, columns: Mapping[str, object]) -> dict[str, pa.Array]:
    """Arrow's arrays of columns, by name; all columns of Python values become arrays in one call of Arrow's.

    A call takes several microseconds, however few values there are, and most rows come one by one.
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
    """Some columns of a data set as one type; which of them are Python values differs by who makes the rows alone."""
    return pa.struct([(name, _kinds(dataset)[name]) for name in names])


def _array(values: object, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        return pa.array(values, kind)
    return values if values.type == kind else values.cast(kind)


def ragged(arrays: list[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Wrap one array a row as a list column without a Python object for each element.

    Example: ragged([np.array([1, 2]), np.array([3])], pa.large_list(pa.int32())) is [[1, 2], [3]].
    """
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.empty(0)
    values = _array(pa.array(flat), kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=kind)
