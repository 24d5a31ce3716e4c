"""`rollmill publish`: every stored row of finished steps is in a table once, whatever happened in between."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import lance
import polars as pl
import pyarrow as pa
import pytest
from datasets import load_dataset
from deltalake import DeltaTable
from polars.testing import assert_frame_equal
from pyiceberg.table import Table

from rollmill.tasks.errors import ConfigError, StoreError
from rollmill.tasks.look.export.dataset_export import list_partitions
from rollmill.tasks.look.publish.iceberg_tables import open_catalog
from rollmill.tasks.look.publish.publication import PUBLISHED, Place, open_place, publish_runs
from rollmill.tasks.look.publish.stored_parts import StoredPart, list_parts
from rollmill.tasks.store.filesystem import open_files
from rollmill.tasks.store.folders import RunFolder, partition_folder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.rows import rows_from_table
from rollmill.tasks.store.run.manifest import read_manifest
from rollmill.tasks.store.shards.shard import write_shard
from rollmill.tasks.store.shards.shard_names import ShardName
from tests.stubs.dataset_hub import DatasetHub, serve_dataset_hub

Command = Callable[..., str]
REPOSITORY = "some-user/rows"
ROWS = {"rollouts": 48, "scores": 92, "groups": 12, "batches": 21, "evaluations": 8, "metrics": 49}
KEYS = ("run", "trajectory_id", "scorer", "group", "step", "name", "env", "stat")
KILLED = """\
import os, signal, sys
from rollmill.tasks.look.publish import publication
from rollmill.tasks.store.folders import RunFolder
run, to = sys.argv[1:]
place, left = publication.open_place(to), 5
for dataset in publication.PUBLISHED:
    for part in publication.list_parts(RunFolder(run), dataset):
        publication.Publication().publish_part(part, place, to)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    """A hub that huggingface_hub uses."""
    with serve_dataset_hub(REPOSITORY) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield server


def iceberg_table(place: str, dataset: str) -> Table:
    return open_catalog(place)[0].load_table(f"rollmill.{dataset}")


class Lake:
    """A place of one format, and its rows as the format's library reads them."""

    def __init__(self, form: str, folder: Path, hub: DatasetHub) -> None:
        self.form, self._folder, self._hub, self._n_reads = form, folder, hub, 0
        self.to = f"{form}:{REPOSITORY if form == 'huggingface' else folder}"

    def read(self, dataset: str) -> pa.Table:
        match self.form:
            case "delta":
                return DeltaTable(f"{self._folder}/{dataset}").to_pyarrow_table()
            case "iceberg":
                return iceberg_table(str(self._folder), dataset).scan().to_arrow()
            case "lance":
                return lance.dataset(f"{self._folder}/{dataset}.lance").to_table()
        # The library caches by folder.
        self._n_reads += 1
        clone = self._folder / str(self._n_reads)
        self._hub.save(clone)
        cache = str(clone / "cache")
        return load_dataset(str(clone), dataset, split="train", cache_dir=cache).with_format("arrow")[:]


@pytest.fixture(params=["delta", "iceberg", "lance", "huggingface"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, hub: DatasetHub) -> Lake:
    return Lake(request.param, tmp_path / "lake", hub)


@pytest.fixture
def stopped_run(small_run: RunFolder, tmp_path: Path) -> RunFolder:
    """The run as it was in step 2, of which rows are stored."""
    folder = RunFolder(tmp_path / "runs" / "stopped")
    shutil.copytree(small_run.local, folder.local)
    for later in ("batches/step=000002", "metrics/step=000002", "evaluations/version=000003"):
        shutil.rmtree(folder.local / later)
    manifest = folder.local / "run.json"
    manifest.write_text(manifest.read_text().replace('"finished"', '"running"'))
    assert read_manifest(folder).status == "running"
    return folder


def finish(stopped: RunFolder, small_run: RunFolder) -> None:
    """Store what the run stores from there on."""
    shutil.copytree(small_run.local, stopped.local, dirs_exist_ok=True)


def assert_has_rows(lake: Lake, dataset: str, *expected: pa.Table) -> None:
    """Every value of these rows is in the table, NaN included, and no other row."""
    stored = pl.concat([pl.DataFrame(each) for each in expected])
    keys = [name for name in KEYS if name in stored.columns]
    found = pl.DataFrame(lake.read(dataset)).select(
        pl.col(name).cast(kind) for name, kind in stored.schema.items()
    )
    assert_frame_equal(found.sort(keys), stored.sort(keys), check_exact=True)


def test_a_table_has_every_value_of_every_finished_step_and_later_calls_add_later_steps(
    lake: Lake, stopped_run: RunFolder, small_run: RunFolder
) -> None:
    first = publish_runs([stopped_run], lake.to)
    # Step 2 is open. The last evaluation that is known to be complete is that of version 0.
    assert first.parts == {
        name: 1 if name == "evaluations" else 4 if name == "scores" else 2 for name in ROWS
    }
    assert {*lake.read("rollouts")["step"].to_pylist()} == {0, 1}
    assert publish_runs([stopped_run], lake.to).rows == {}
    finish(stopped_run, small_run)
    second = publish_runs([stopped_run], lake.to)
    assert first.rows + second.rows == ROWS
    for dataset in PUBLISHED:
        assert_has_rows(lake, dataset, read(small_run, dataset))
    assert publish_runs([stopped_run, small_run], lake.to).rows == {}


def change_run(folder: RunFolder, run: str, target: RunFolder) -> RunFolder:
    """Write the scores and metrics of a run as those of a run with another id."""
    target.local.mkdir(parents=True)
    manifest = (folder.local / "run.json").read_text()
    (target.local / "run.json").write_text(manifest.replace(read_manifest(folder).run, run))
    for dataset in ("scores", "metrics"):
        for partition in list_partitions(folder, dataset)[dataset]:
            rows = read(folder, dataset, None, **partition)
            changed = rows.set_column(0, rows.schema.field(0), pa.array([run] * rows.num_rows))
            write = partial(
                write_shard, name=ShardName(1, 0), dataset=dataset, appended=[rows_from_table(changed)]
            )
            open_files(target).publish(partition_folder(dataset, partition), write)
    return target


def test_a_table_holds_several_runs(lake: Lake, small_run: RunFolder, tmp_path: Path) -> None:
    other = change_run(small_run, "07e107e107e107e1", RunFolder(tmp_path / "runs" / "other"))
    for runs in ([small_run], [other, small_run], [other]):
        publish_runs(runs, lake.to, ["scores", "metrics"])
    for dataset in ("scores", "metrics"):
        assert_has_rows(lake, dataset, read(small_run, dataset), read(other, dataset))


def test_attempts_that_were_added_to_a_published_step_follow(
    lake: Lake, small_run: RunFolder, redone_run: RunFolder
) -> None:
    datasets = ["rollouts", "scores"]
    publish_runs([small_run], lake.to, datasets)
    assert publish_runs([redone_run], lake.to, datasets).rows == {"rollouts": 1, "scores": 1}
    assert_has_rows(lake, "rollouts", read(redone_run, "rollouts"))


def test_a_fork_with_fewer_rows_of_its_source_adds_none(
    small_run: RunFolder, redone_run: RunFolder, tmp_path: Path
) -> None:
    fork = RunFolder(tmp_path / "runs" / "fork")
    shutil.copytree(small_run.local, fork.local)
    manifest = fork.local / "run.json"
    manifest.write_text(manifest.read_text().replace(read_manifest(fork).run, "f02cf02cf02cf02c"))
    to = f"delta:{tmp_path / 'lake'}"
    publish_runs([redone_run], to, ["rollouts"])
    published = publish_runs([fork], to, ["rollouts"])
    assert (published.rows, published.replaced) == ({}, [])


def test_published_types_are_those_that_all_formats_have(small_run: RunFolder) -> None:
    for dataset in PUBLISHED:
        rows = next(iter(list_parts(small_run, dataset))).read_rows(0)
        assert "large" not in str(rows.schema)
        assert all(each.nullable for each in rows.schema)


def test_a_table_without_a_newer_column_gets_it(lake: Lake, small_run: RunFolder) -> None:
    place = open_place(lake.to)
    first = next(iter(list_parts(small_run, "rollouts")))
    place.append(first, first.read_rows(0).drop_columns(["turn_starts", "queue_s"]), first.mark(first.n_rows))
    place.finish()
    assert publish_runs([small_run], lake.to, ["rollouts"]).parts == {"rollouts": 2}
    rows = pl.DataFrame(lake.read("rollouts")).select("step", "turn_starts", "queue_s")
    is_first = pl.col("step") == 0
    assert rows.filter(is_first).select(pl.col("turn_starts", "queue_s").null_count()).row(0) == (16, 16)
    assert rows.filter(~is_first).null_count().row(0) == (0, 0, 0)


@pytest.mark.slow
def test_a_killed_command_loses_no_row_and_publishes_none_twice(
    lake: Lake, small_run: RunFolder, hub: DatasetHub
) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", KILLED, small_run.location, lake.to]
    killed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    published = publish_runs([small_run], lake.to)
    # Files for the hub were still being gathered.
    assert sum(published.parts.values()) == 20 - (0 if lake.form == "huggingface" else 5)
    for dataset in PUBLISHED:
        assert_has_rows(lake, dataset, read(small_run, dataset))


def test_rows_that_were_deleted_from_a_table_do_not_come_back(small_run: RunFolder, tmp_path: Path) -> None:
    forms = [f"{form}:{tmp_path / form}" for form in ("delta", "iceberg", "lance")]
    for to in forms:
        publish_runs([small_run], to, ["groups"])
    delta = DeltaTable(tmp_path / "delta" / "groups")
    delta.delete("step = 0")
    delta.create_checkpoint()
    for commit in (tmp_path / "delta" / "groups" / "_delta_log").glob("*.json"):
        commit.unlink()
    iceberg = iceberg_table(str(tmp_path / "iceberg"), "groups")
    iceberg.delete("step = 0")
    iceberg.maintenance.expire_snapshots().older_than(datetime.now() + timedelta(days=1)).commit()
    table = lance.dataset(str(tmp_path / "lance" / "groups.lance"))
    table.delete("step = 0")
    table.cleanup_old_versions(older_than=timedelta(0))
    assert len(table.versions()) == 1
    assert [publish_runs([small_run], to, ["groups"]).rows for to in forms] == [{}, {}, {}]


@pytest.mark.parametrize("has_table", [False, True])
def test_of_two_commands_at_once_one_is_refused(lake: Lake, small_run: RunFolder, has_table: bool) -> None:
    if lake.form == "lance" and has_table:
        pytest.skip("Lance appends both, as docs/how-to/publish.md says")
    groups = list(list_parts(small_run, "groups"))

    def append(place: Place, *parts: StoredPart) -> None:
        for part in parts:
            place.append(part, part.read_rows(0), part.mark(part.n_rows))
        place.finish()

    if has_table:
        publish_runs([small_run], lake.to, ["metrics"])
        first = open_place(lake.to)
        first.read_mark(groups[0])
        append(first, groups[0])
    places = [open_place(lake.to) for _ in range(2)]
    assert [place.read_mark(groups[1]) for place in places] == [0, 0]
    append(places[0], groups[1])
    with pytest.raises(Exception, match=r"(?i)concurrent|already exists|has changed|has happened since"):
        append(places[1], groups[1], groups[2])
    publish_runs([small_run], lake.to, ["groups"])
    assert_has_rows(lake, "groups", read(small_run, "groups"))


def test_rows_that_were_replaced_since_are_reported_and_not_mixed(
    rollmill: Command, stopped_run: RunFolder, tmp_path: Path
) -> None:
    to = f"delta:{tmp_path / 'lake'}"
    assert "152 new rows" in rollmill("publish", stopped_run.location, "--to", to)
    rows = read(stopped_run, "scores", scorer="addition@1", step=1).to_pylist()
    rescored = pa.RecordBatch.from_pylist(
        [row | {"reward": 0.5} for row in rows], read(stopped_run, "scores").schema
    )
    write = partial(
        write_shard, name=ShardName(2, 0, is_compacted=True), dataset="scores", appended=[rescored]
    )
    open_files(stopped_run).publish("scores/scorer=addition@1/step=000001", write)
    before = DeltaTable(tmp_path / "lake" / "scores").version()
    said = rollmill("publish", stopped_run.location, "--to", to)
    assert "scores/scorer=addition@1/step=000001: its rows were replaced since they were published" in said
    assert DeltaTable(tmp_path / "lake" / "scores").version() == before


def test_commits_name_run_and_step_and_columns_their_meaning(small_run: RunFolder, tmp_path: Path) -> None:
    publish_runs([small_run], f"delta:{tmp_path}/delta", ["groups"])
    table = DeltaTable(tmp_path / "delta" / "groups")
    run = read_manifest(small_run).run
    assert [(each["rollmill.run"], each["rollmill.step"]) for each in table.history()] == [
        (run, str(step)) for step in (2, 1, 0)
    ]
    assert table.to_pyarrow_table().schema.field("duration_s").metadata[b"comment"].endswith(b"; unit s")
    publish_runs([small_run], f"iceberg:{tmp_path}/iceberg", ["groups"])
    groups = iceberg_table(f"{tmp_path}/iceberg", "groups")
    assert [each.summary["rollmill.step"] for each in groups.snapshots()] == ["0", "1", "2"]
    assert groups.schema().find_field("env").doc == "environment"
    publish_runs([small_run], f"lance:{tmp_path}/lance", ["groups"])
    versions = lance.dataset(f"{tmp_path}/lance/groups.lance")
    assert [
        versions.read_transaction(each).transaction_properties["rollmill.step"] for each in (1, 2, 3)
    ] == ["0", "1", "2"]


def test_a_repository_is_private_and_its_card_keeps_what_a_user_wrote(
    hub: DatasetHub, small_run: RunFolder
) -> None:
    to = f"huggingface:{REPOSITORY}"
    publish_runs([small_run], to, ["groups"])
    assert hub.is_private
    hub.files["README.md"] = hub.files["README.md"].replace(b"Rows of", b"My rows of")
    publish_runs([small_run], to, ["metrics"])
    card = hub.files["README.md"].decode()
    assert "My rows of" in card
    assert [name in card for name in ("groups/**/*.parquet", "metrics/**/*.parquet")] == [True, True]
    assert len(hub.commits) == 3


def test_a_repository_that_was_made_in_the_browser_gets_the_tables(
    hub: DatasetHub, small_run: RunFolder
) -> None:
    hub.files["README.md"] = b"---\nlicense: mit\n---\n# Mine\n"
    publish_runs([small_run], f"huggingface:{REPOSITORY}", ["groups"])
    card = hub.files["README.md"].decode()
    assert "license: mit" in card
    assert "groups/**/*.parquet" in card


@pytest.mark.parametrize(
    ("to", "remedy"),
    [
        ("parquet:x", "unknown format; give delta:PATH"),
        ("delta", "give delta:PATH"),
        ("iceberg:s3://bucket/lake", "name a catalog of pyiceberg's configuration"),
        ("iceberg:nocat", r"has no catalog nocat; for a catalog in a new folder give iceberg:\./nocat"),
        ("huggingface:rows", "give the repository as USER/NAME"),
    ],
)
def test_a_wrong_place_is_refused_with_what_to_give(
    small_run: RunFolder, to: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=remedy):
        publish_runs([small_run], to)
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    rollmill: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rollmill.tasks.look.publish.delta_tables", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    said = rollmill("publish", "small", "--to", "delta:lake")
    assert "it needs deltalake: pip install 'rollmill[publish]'" in said
    assert "Traceback" not in said


def test_a_data_set_without_steps_is_refused(small_run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be published"):
        publish_runs([small_run], f"delta:{tmp_path}", ["shards"])


def test_an_error_of_a_library_names_rows_and_place(small_run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("a file")
    with pytest.raises(
        StoreError,
        match=r"^cannot publish rollouts/step=000000 of run 5eed5eed5eed5eed to delta:.*\n.*continues$",
    ):
        publish_runs([small_run], f"delta:{tmp_path / 'lake'}")


def test_the_page_reads_tables_of_three_formats(
    small_run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for to, dataset in (("delta", "rollouts"), ("iceberg", "scores"), ("lance", "metrics")):
        publish_runs([small_run], f"{to}:lake/{to}", [dataset])
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "publish.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found: dict[str, pl.DataFrame] = {}
    exec(code, found)
    assert {name: len(found[name]) for name in ("rollouts", "scores", "metrics")} == {
        name: ROWS[name] for name in ("rollouts", "scores", "metrics")
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["delta", "lance"])
def test_tables_on_s3_get_each_row_once(
    form: str, small_run: RunFolder, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    to = f"{form}:{s3_root}"
    assert publish_runs([small_run], to, ["groups"]).rows == {"groups": 12}
    assert publish_runs([small_run], to, ["groups", "metrics"]).rows == {"metrics": 49}
    found = (
        DeltaTable(f"{s3_root}/groups").to_pyarrow_table()
        if form == "delta"
        else lance.dataset(f"{s3_root}/groups.lance").to_table()
    )
    assert found.num_rows == 12
