"""States of environments as typed columns."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rollmill.tasks.errors import RunMismatchError, SchemaError
from rollmill.tasks.look.export.dataset_export import export_datasets
from rollmill.tasks.store.environment_states import TYPES, check_columns, check_stored_columns, state_row
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.shards.writer import RunWriter

VALUES = {
    "bool": True,
    "int64": -3,
    "float64": 0.5,
    "string": "a",
    "list<bool>": [True, False],
    "list<int64>": [1, 2],
    "list<float64>": [],
    "list<string>": ["a", "b"],
}


def row(columns, values, env="game", sample=0, **given):
    keys = {"run": "run", "step": 0, "group": 1, "sample": sample, "trajectory_id": f"run.1.{sample}.0"}
    return state_row(env, columns, **keys, values=values, **given)


async def store_states(folder: RunFolder, env: str, *rows) -> None:
    async with RunWriter(open_files(folder), 1, 0.0) as writer:
        for each in rows:
            await writer.append("states", each, env=env, step=0)


async def test_every_type_is_read_back_unchanged(folder: RunFolder) -> None:
    columns = {f"c{i}": kind for i, kind in enumerate(TYPES)}
    given = {name: VALUES[kind] for name, kind in columns.items()}
    await store_states(folder, "game", row(columns, given))
    (got,) = read(folder, "states", env="game").to_pylist()
    assert {name: got[name] for name in columns} == given
    assert (got["trajectory_id"], got["error"]) == ("run.1.0.0", "")


async def test_a_value_of_another_type_is_null_and_reported_and_the_others_stay(folder: RunFolder) -> None:
    columns = {"n": "int64", "words": "list<string>", "left_out": "bool"}
    await store_states(folder, "game", row(columns, {"n": "three", "words": ["a"], "more": 1}))
    (got,) = read(folder, "states", env="game").to_pylist()
    assert (got["n"], got["words"], got["left_out"]) == (None, ["a"], None)
    assert got["error"] == "n: expected int64, got 'three'; more: no such column"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"n": 10**5000}, "n: expected int64, got a int that cannot be shown"),
        ({"n": 1, "\ud800": 2}, "?: no such column"),
    ],
)
def test_values_that_cannot_be_shown_lose_no_row(values: dict[str, object], error: str) -> None:
    (got,) = row({"n": "int64"}, values).to_pylist()
    assert got["error"] == error


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", 3.7),
        ("int64", np.float32(0.5)),
        ("int64", True),
        ("int64", 1 << 63),
        ("float64", True),
        ("bool", 1),
        ("string", b"x"),
        ("list<int64>", [1, 1.5]),
        ("list<int64>", b"x"),
        ("list<int64>", np.array([1.5])),
        ("list<int64>", np.array(1)),
        ("list<float64>", [True]),
        ("list<string>", "abc"),
        ("list<string>", [b"x"]),
        ("list<string>", {"abc": 1}),
    ],
)
def test_a_value_that_arrow_would_change_is_null_and_reported(kind: str, value: object) -> None:
    made = row({"c": kind}, {"c": value})
    assert made.column("c").to_pylist() == [None]
    assert made.column("error").to_pylist() == [f"c: expected {kind}, got {value!r}"]


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("int64", np.uint8(3), 3),
        ("float64", 3, 3.0),
        ("float64", np.float32(0.5), 0.5),
        ("bool", np.bool_(True), True),
        ("list<int64>", np.array([1, 2]), [1, 2]),
        ("list<int64>", (1, None), [1, None]),
        ("list<float64>", [1, 2.5], [1.0, 2.5]),
        ("list<string>", ["abc", ""], ["abc", ""]),
    ],
)
def test_numbers_of_numpy_whole_numbers_as_floats_and_any_sequence_fit(
    kind: str, value: object, kept: object
) -> None:
    made = row({"c": kind}, {"c": value})
    assert made.column("c").to_pylist() == [kept]
    assert made.column("error").to_pylist() == [""]


async def test_a_plain_scan_of_one_environment_reads_any_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.tmp.mkdir(parents=True)
    env = "verifiers:owner/some game"
    await store_states(
        folder, env, row({"n": "int64"}, {"n": 1}, env), row({"n": "int64"}, {}, env, sample=1)
    )
    (shards,) = {path.rpartition("/step=")[0] for path in open_files(folder).keys("states/*/*/*.arrow")}
    frame = pl.scan_ipc(f"{folder.location}/{shards}/**/*.arrow", hive_partitioning=True).collect()
    assert frame["n"].to_list() == [1, None]
    assert frame["env"].unique().to_list() == [env]


async def test_states_of_an_environment_of_a_library_are_exported(folder: RunFolder, tmp_path: Path) -> None:
    await store_states(folder, "verifiers:game", row({"n": "int64"}, {"n": 1}, "verifiers:game"))
    (made,) = export_datasets(folder, tmp_path / "out", "parquet", ["states"])
    assert pl.read_parquet(tmp_path / "out" / "states-verifiers%3Agame.parquet", glob=False)[
        "n"
    ].to_list() == [1]
    assert made.rows == 1


async def test_a_run_does_not_resume_with_an_environment_of_other_columns(folder: RunFolder) -> None:
    await store_states(folder, "game", row({"n": "int64"}, {"n": 1}))
    check_stored_columns(folder, "game", {"n": "int64"})
    check_stored_columns(folder, "another", {"n": "string"})
    with pytest.raises(RunMismatchError, match=r"at n: stored are n: int64, now n: large_string"):
        check_stored_columns(folder, "game", {"n": "string"})


@pytest.mark.parametrize(
    ("columns", "message"),
    [({"n m": "int64"}, "'n m'"), ({"step": "int64"}, "'step'"), ({"n": "int32"}, "list<int64>")],
)
def test_invalid_columns_are_refused(columns: dict[str, str], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        check_columns(columns)
