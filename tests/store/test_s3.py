"""Files on S3: what comes from the environment, transient errors, forks, few requests, errors in words."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from s3_proxy import FailingProxy

from rollmill.tasks.errors import ConfigError, ShardError, StoreError
from rollmill.tasks.store.filesystem import open_files, publish_text, read_text
from rollmill.tasks.store.folders import SCRATCH_ENV, RunFolder
from rollmill.tasks.store.reader import read
from rollmill.tasks.store.s3 import s3_objects
from rollmill.tasks.store.s3.s3_errors import MissingObjectError, ObjectChangedError
from rollmill.tasks.store.s3.s3_files import AHEAD_BYTES, TAIL_BYTES, check_s3
from rollmill.tasks.store.s3.s3_objects import S3Objects, s3_filesystem
from rollmill.tasks.store.schemas import make_batch
from rollmill.tasks.store.shards.writer import RunWriter

RowMaker = Callable[..., pa.RecordBatch]


@pytest.fixture
def run(s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(SCRATCH_ENV, str(tmp_path / "scratch"))
    return RunFolder(f"{s3_root}/run")


@pytest.fixture
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Set environment variables (None: remove); later requests are made as in a process started with them."""

    def begin(**variables: str | None) -> None:
        for name, value in variables.items():
            monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        s3_objects._filesystem.cache_clear()
        s3_objects._read_attempts.cache_clear()

    yield begin
    monkeypatch.undo()
    s3_objects._filesystem.cache_clear()
    s3_objects._read_attempts.cache_clear()


@contextmanager
def run_proxy(endpoint: str, set_environment: Callable[..., None], share: float) -> Iterator[FailingProxy]:
    with FailingProxy(endpoint, share).running() as proxy:
        set_environment(AWS_ENDPOINT_URL=proxy.url)
        yield proxy


@pytest.mark.slow
async def test_rows_are_stored_once_though_a_third_of_the_requests_fails(
    run: RunFolder, rows: RowMaker, s3_endpoint: str, set_environment: Callable[..., None]
) -> None:
    with run_proxy(s3_endpoint, set_environment, 1 / 3) as proxy:
        async with RunWriter(open_files(run), epoch=1, flush_s=0.0) as writer:
            for group in range(20):
                await writer.append("rollouts", rows("rollouts", step=0, group=group), step=0)
        found = await asyncio.to_thread(read, run, "rollouts", ["group"])
    assert sorted(found["group"].to_pylist()) == list(range(20))
    assert len(proxy.requests) > 20 + 1 + 20


def test_a_server_that_keeps_failing_is_an_error_with_the_number_of_attempts(
    run: RunFolder, s3_endpoint: str, set_environment: Callable[..., None]
) -> None:
    set_environment(AWS_MAX_ATTEMPTS="2")
    with (
        run_proxy(s3_endpoint, set_environment, 1.0),
        pytest.raises(StoreError, match=r"cannot list s3://.*, tried 2 times: .*AWS_ENDPOINT_URL"),
    ):
        open_files(run).keys("run.json")


def test_a_column_of_a_large_shard_needs_few_requests_and_few_of_its_bytes(
    run: RunFolder, s3_endpoint: str, set_environment: Callable[..., None]
) -> None:
    n_tokens = 400_000
    columns = {
        "run": ["r"] * 4,
        "step": [0] * 4,
        "trajectory_id": list("abcd"),
        "logprobs": [np.zeros(n_tokens, np.float32)] * 4,
        "entropy": [np.zeros(n_tokens, np.float32)] * 4,
        "ratio": [np.zeros(n_tokens, np.float32)] * 4,
        "clipped": [np.zeros(n_tokens, np.bool_)] * 4,
    }

    async def store() -> None:
        async with RunWriter(open_files(run), epoch=1, flush_s=0.0) as writer:
            await writer.append("annotations", make_batch("annotations", columns), step=0)

    asyncio.run(store())
    (key,) = open_files(run).keys("annotations/**/*.arrow")
    (size,) = S3Objects(run.location.removeprefix("s3://")).keys(key).values()
    with run_proxy(s3_endpoint, set_environment, 0.0) as proxy:
        source = open_files(run).open(key)
        fields = [source_field("annotations", "trajectory_id")]
        table = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields)).read_all()
    assert table["trajectory_id"].to_pylist() == list("abcd")
    assert len(proxy.requests) <= 3, proxy.requests
    assert size > 10 * (TAIL_BYTES + 2 * AHEAD_BYTES)


def source_field(dataset: str, name: str) -> int:
    from rollmill.tasks.store.schemas import dataset_schema

    return int(dataset_schema(dataset).get_field_index(name))


def test_a_large_file_is_uploaded_in_parts_and_appears_whole_or_not_at_all(run: RunFolder) -> None:
    files = open_files(run)
    content = os.urandom(2 * s3_objects.PART_BYTES + 1)
    publish_text(files, "big", content)
    assert read_text(files, "big") == content

    def break_off(path: Path) -> str:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left on device"):
        files.publish("", break_off)
    assert files.keys("**") == ["big"]
    assert list(run.tmp.iterdir()) == []


def test_an_object_is_created_once_and_replaced_only_by_who_has_its_last_content(run: RunFolder) -> None:
    below = S3Objects(run.location.removeprefix("s3://"))
    first = below.put("lock", b"one")
    assert below.get("lock").etag == first
    with pytest.raises(ObjectChangedError):
        below.put("lock", b"two")
    second = below.put("lock", b"two", replaces=first)
    with pytest.raises(ObjectChangedError):
        below.put("lock", b"three", replaces=first)
    assert below.get("lock").content == b"two"
    assert below.get("lock").etag == second
    assert 0.0 <= below.get("lock").age_s < 60.0


def test_a_removed_object_is_gone_and_removing_a_missing_one_is_no_error(run: RunFolder) -> None:
    files = open_files(run)
    publish_text(files, "a/b", b"1")
    files.remove(["a/b", "a/c"])
    files.remove([])
    assert files.keys("**") == []
    with pytest.raises(MissingObjectError, match=f"cannot read {run.path('a/b')}: there is no such object"):
        files.open("a/b")


def test_listings_are_never_those_of_a_moment_ago(run: RunFolder) -> None:
    files = open_files(run)
    assert files.keys("a/*") == []
    other = S3Objects(run.location.removeprefix("s3://"))
    other.put("a/b", b"")
    assert files.keys("a/*") == ["a/b"]
    assert files.keys("*") == []


def test_a_forked_child_opens_new_connections(run: RunFolder) -> None:
    files = open_files(run)
    publish_text(files, "of", b"the parent")
    ours = s3_filesystem()
    child = os.fork()
    if child == 0:
        try:
            text = read_text(open_files(run), "of")
            publish_text(open_files(run), "child", text)
            os._exit(0 if s3_filesystem() is not ours else 1)
        except BaseException:  # noqa: BLE001 - a child must not continue with the parent's tests
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_text(files, "child") == b"the parent"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "profile"])
def test_endpoint_and_credentials_are_found_where_every_aws_tool_looks(
    run: RunFolder, s3_endpoint: str, set_environment: Callable[..., None], tmp_path: Path, name: str
) -> None:
    if name == "profile":
        config = tmp_path / "config"
        config.write_text(
            f"[profile lab]\nendpoint_url={s3_endpoint}\naws_access_key_id=a\naws_secret_access_key=b\n"
        )
        variables: dict[str, str | None] = {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "lab"}
        variables |= dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    else:
        variables = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", name: s3_endpoint}
    set_environment(**variables)
    publish_text(open_files(run), "a", b"1")
    assert open_files(run).keys("*") == ["a"]


def test_errors_name_the_location_and_the_remedy(
    run: RunFolder, set_environment: Callable[..., None], tmp_path: Path
) -> None:
    nowhere = RunFolder("s3://no-such-bucket/run")
    with pytest.raises(ShardError, match=r"cannot read s3://no-such-bucket/run/run.json: .*make the bucket"):
        open_files(nowhere).open("run.json")
    nothing = str(tmp_path / "none")
    set_environment(AWS_ACCESS_KEY_ID=None, AWS_CONFIG_FILE=nothing, AWS_SHARED_CREDENTIALS_FILE=nothing)
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        open_files(run).keys("run.json")
    set_environment(AWS_PROFILE="nobody")
    with pytest.raises(StoreError, match=r"nobody.*AWS_PROFILE names a profile"):
        open_files(run).keys("run.json")
    set_environment(
        AWS_PROFILE=None, AWS_ACCESS_KEY_ID="a", AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1"
    )
    with pytest.raises(StoreError, match=r"Could not connect.*AWS_ENDPOINT_URL"):
        open_files(run).keys("run.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_MAX_ATTEMPTS", "abc"), ("AWS_MAX_ATTEMPTS", "0"), ("AWS_ENDPOINT_URL", "localhost:9")],
)
def test_settings_that_cannot_be_understood_are_errors_in_words(
    set_environment: Callable[..., None], name: str, value: str
) -> None:
    set_environment(**{"AWS_ENDPOINT_URL": "http://127.0.0.1:9", name: value})
    remedy = r"AWS_ENDPOINT_URL begins with http:// or https://, AWS_MAX_ATTEMPTS is a whole number from 1"
    with pytest.raises(StoreError, match=remedy):
        open_files(RunFolder("s3://bucket/run")).keys("run.json")
    with pytest.raises(ConfigError, match=remedy):
        check_s3("s3://bucket/run")


def test_a_root_for_runs_is_checked_before_anything_starts_and_left_unchanged(
    s3_root: str, s3_endpoint: str, set_environment: Callable[..., None]
) -> None:
    check_s3(s3_root)
    assert S3Objects(s3_root.removeprefix("s3://")).keys("") == {}
    with pytest.raises(ConfigError, match=r"store\.root = 's3://no-such-bucket/runs': .*make the bucket"):
        check_s3("s3://no-such-bucket/runs")
    with run_proxy(s3_endpoint, set_environment, 0.0) as proxy:
        proxy.taken_away = {"if-none-match", "if-match"}
        with pytest.raises(ConfigError, match="ignores If-None-Match and If-Match"):
            check_s3(s3_root)
        assert S3Objects(s3_root.removeprefix("s3://")).keys("") == {}
