"""`rollmill export`: data sets in formats that every tool reads, whole or not at all."""

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmill.tasks.errors import ConfigError, ShardError
from rollmill.tasks.look.export.dataset_export import export_datasets, json_lines
from rollmill.tasks.store.environment_states import state_row
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.logprob_rows import make_logprob_rows
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.schemas import dataset_schema, make_batch
from rollmill.tasks.store.shards.writer import RunWriter

Command = Callable[..., str]


def test_parquet_has_every_row_bit_for_bit_with_its_types_and_meanings(
    small_run: RunFolder, tmp_path: Path
) -> None:
    written = export_datasets(small_run, tmp_path / "out", "parquet")
    assert {each.path.stem: each.rows for each in written} == {
        "plans": 3,
        "rollouts": 48,
        "scores": 92,
        "groups": 12,
        "batches": 21,
        "evaluations": 8,
        "metrics": 49,
    }
    rollouts = pq.read_table(tmp_path / "out" / "rollouts.parquet")
    assert rollouts.schema.equals(dataset_schema("rollouts"))
    assert rollouts.schema.field("logprobs").metadata[b"unit"] == b"nats"
    stored = read(small_run, "rollouts")
    for name in ("trajectory_id", "token_ids", "loss_mask", "started_at", "messages"):
        assert rollouts[name].to_pylist() == stored[name].to_pylist()
    bits = [table["logprobs"].combine_chunks().flatten().view(pa.int32()) for table in (rollouts, stored)]
    assert bits[0].equals(bits[1])


def test_json_lines_have_json_values_iso_times_and_no_nan(rollmill: Command, tmp_path: Path) -> None:
    output = tmp_path / "lines"
    shown = rollmill("export", "small", "--to", "jsonl", "--dataset", "rollouts", "--output", str(output))
    assert str(output / "rollouts.jsonl") in shown
    assert [each.name for each in output.iterdir()] == ["rollouts.jsonl"]
    lines = [json.loads(line, parse_constant=pytest.fail) for line in (output / "rollouts.jsonl").open()]
    by_id = {line["trajectory_id"]: line for line in lines}
    assert len(by_id) == 48
    row = by_id["5eed5eed5eed5eed.6.0.0"]
    assert row["messages"][-1] == {"role": "assistant", "content": "[16+26=42]42"}
    assert row["example"]["answer"] == "42"
    assert row["started_at"] == "2026-11-01T12:00:10+00:00"
    assert row["logprobs"][:7] == [None] * 6 + [-0.6]
    assert (len(row["token_ids"]), sum(row["loss_mask"])) == (19, 13)
    assert by_id["5eed5eed5eed5eed.5.3.0"]["token_ids"] == []


def test_bytes_are_base64_and_nan_in_json_text_is_null() -> None:
    routed = make_batch(
        "routing",
        {"run": ["r"], "step": [0], "trajectory_id": ["t"], "shape": [[1, 1, 2]]}
        | {"dtype": ["uint8"], "experts": [b"\x00\xff"]},
    )
    assert base64.b64decode(json.loads(next(json_lines(routed)))["experts"]) == b"\x00\xff"
    field = dataset_schema("scores").field("components")
    rows = pa.record_batch([pa.array(['{"a": NaN}', "no JSON"], field.type)], schema=pa.schema([field]))
    assert list(json_lines(rows)) == [b'{"components":{"a":null}}\n', b'{"components":"no JSON"}\n']


def test_half_a_surrogate_pair_is_an_escape_and_loses_no_line() -> None:
    fields = [dataset_schema("rollouts").field(name) for name in ("messages", "token_ids")]
    values = [['[{"content": "\\ud83d"}]', "[]"], [[1, 2], [3]]]
    columns = [pa.array(each, field.type) for each, field in zip(values, fields, strict=True)]
    lines = [*json_lines(pa.record_batch(columns, schema=pa.schema(fields)))]
    assert [json.loads(line) for line in lines] == [
        {"messages": [{"content": "\ud83d"}], "token_ids": [1, 2]},
        {"messages": [], "token_ids": [3]},
    ]
    assert all(line.endswith(b"\n") for line in lines)


async def test_states_of_each_environment_are_a_file_with_its_columns(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True)
    keys = {"run": "run", "step": 0, "group": 1, "sample": 0, "trajectory_id": "run.1.0.0"}
    kept = {"guess": ({"n": "int64"}, {"n": 3}), "chess": ({"moves": "list<string>"}, {"moves": ["e4"]})}
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for env, (columns, values) in kept.items():
            await writer.append("states", state_row(env, columns, **keys, values=values), env=env, step=0)
    export_datasets(folder, tmp_path / "out", "jsonl", ["states"])
    lines = {each.name: json.loads(each.read_text()) for each in (tmp_path / "out").iterdir()}
    assert lines["states-guess.jsonl"]["n"] == 3
    assert lines["states-chess.jsonl"]["moves"] == ["e4"]


async def test_log_probabilities_of_other_policies_are_a_file_each(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True)
    async with RunWriter(open_files(folder), epoch=1, flush_s=0.0) as writer:
        for policy, value in (("reference", -1.0), ("trainer", -2.0)):
            rows = make_logprob_rows("run", 0, ["m"], ["run.1.0.0"], [np.array([np.nan, value])])
            await writer.append("logprobs", rows, policy=policy, step=0)
    export_datasets(folder, tmp_path / "out", "jsonl", ["logprobs"])
    lines = {each.name: json.loads(each.read_text()) for each in (tmp_path / "out").iterdir()}
    assert lines["logprobs-reference.jsonl"]["logprobs"] == [None, -1.0]
    assert lines["logprobs-trainer.jsonl"]["logprobs"] == [None, -2.0]


def test_a_data_set_that_is_named_is_a_file_once_also_without_rows(
    small_run: RunFolder, tmp_path: Path
) -> None:
    written = export_datasets(small_run, tmp_path / "out", "parquet", ["states", "plans", "plans", "routing"])
    assert [(each.path.name, each.rows) for each in written] == [
        ("states.parquet", 0),
        ("plans.parquet", 3),
        ("routing.parquet", 0),
    ]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(
        each.path.name for each in written
    )
    assert pq.read_table(tmp_path / "out" / "states.parquet").schema.names[:2] == ["run", "step"]


def test_an_unknown_data_set_is_a_wrong_option_and_the_known_ones_are_named(
    small_run: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--dataset = 'nope': unknown data set; .* states$"):
        export_datasets(small_run, tmp_path / "out", "parquet", ["nope"])


def test_an_export_that_fails_leaves_nothing_and_none_is_written_over(
    small_run: RunFolder, rollmill: Command, tmp_path: Path
) -> None:
    assert "it exists already" in rollmill("export", "small", "--to", "parquet", "--output", str(tmp_path))
    assert "give parquet or jsonl" in rollmill("export", "small", "--to", "csv")
    broken = RunFolder(tmp_path / "broken")
    shard = next(Path(small_run.dataset("groups", step=1)).glob("*.arrow"))
    target = Path(broken.dataset("groups", step=1)) / shard.name
    target.parent.mkdir(parents=True)
    target.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(ShardError, match=str(target)):
        export_datasets(broken, tmp_path / "out", "parquet")
    assert [each.name for each in tmp_path.iterdir()] == ["broken"]
