"""TensorBoard, MLflow and Weights & Biases get a run's metrics, each step once, and never stop or delay it."""

import asyncio
import json
import math
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

from rollmill.tasks.observe.metrics import Metric, Stat
from rollmill.tasks.observe.sinks.metric_sinks import (
    APART,
    EVALUATION,
    STEP,
    Point,
    RunEnd,
    SinkSettings,
    make_points,
    metric_values,
)
from rollmill.tasks.observe.sinks.prometheus_sink import PrometheusSink
from rollmill.tasks.observe.sinks.sink_client import SinkClient
from rollmill.tasks.observe.sinks.sink_process import Feed, MlflowSink
from rollmill.tasks.observe.sinks.wandb_sink import WandbSink
from rollmill.tasks.processes.launched_process import free_port

BLOCK, FULL, LAST = 32768, 1, 4
"""Of LevelDB's log: bytes of a block, and the kinds of a whole record and of a record's last part."""


def step(number: int, **values: float) -> Point:
    return Point(STEP, number, {"train/updated": 1.0} | values)


def values_in(folder: Path) -> Counter[tuple[str, int, float]]:
    """(name, step, value) of the event files in a folder, as their format has them: length, crc, event, crc."""
    found: Counter[tuple[str, int, float]] = Counter()
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            n = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + n]), data[16 + n :]
            found.update((each.tag, event.step, each.simple_value) for each in event.summary.value)
    return found


@pytest.mark.slow
async def test_tensorboards_files_have_each_step_once_however_often_a_run_is_resumed(
    tmp_path: Path,
) -> None:
    settings = SinkSettings("ab", "run", tensorboard=str(tmp_path / "tensorboard"))
    messages: list[str] = []
    for n_steps in (2, 3):
        async with SinkClient(settings, messages.append) as sinks:
            for number in range(n_steps):
                sinks.put(step(number, **{"train/loss": number / 2}))
                sinks.put(step(number, **{"train/loss": number / 2}))
    found = values_in(tmp_path / "tensorboard")
    assert found == Counter(
        {
            (name, number, value): 1
            for number in range(3)
            for name, value in (("train/updated", 1.0), ("train/loss", number / 2))
        }
    )
    assert not messages
    assert sinks.n_failures == 0


@pytest.mark.slow
def test_mlflow_resumes_the_run_of_the_same_id_stores_no_step_twice_and_has_its_status(
    tmp_path: Path,
) -> None:
    from mlflow.tracking import MlflowClient  # not for all tests that are collected: it takes seconds

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    settings = SinkSettings("ab", "small", mlflow_uri=uri, experiment="tests")
    client, statuses = MlflowClient(uri), list[str]()

    def note(sink: MlflowSink) -> None:
        statuses.append(client.get_run(sink.run_id).info.status)

    ends: tuple[tuple[int, RunEnd], ...] = ((1, "killed"), (2, "finished"))
    for n_steps, how in ends:
        sink = MlflowSink(settings)
        note(sink)
        for number in range(n_steps):
            for point in (step(number, loss=0.5), Point(EVALUATION, number, {"evaluation/reward": 0.25})):
                if not sink.has(point.marker, point.step):
                    sink.write(point)
        sink.end(how)
        note(sink)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert statuses == ["RUNNING", "KILLED", "RUNNING", "FINISHED"]
    assert run.info.run_name == "small"
    for name, value in (("train/updated", 1.0), ("loss", 0.5), ("evaluation/reward", 0.25)):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(each.step, each.value) for each in history] == [(0, value), (1, value)]


def logged_in(folder: Path) -> list[Record]:
    """Records of the offline runs in a folder, as their format has them: LevelDB's log behind 7 bytes."""
    records = []
    for path in sorted(folder.glob("*/wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if left := -at % BLOCK if -at % BLOCK < 7 else 0:
                at += left
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (FULL, LAST):
                records.append(Record.FromString(whole))
                whole = b""
    return records


@pytest.mark.slow
def test_wandb_resumes_the_run_of_the_same_id_and_stores_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = SinkSettings("ab", "small", wandb=str(tmp_path))
    ends: tuple[tuple[int, RunEnd], ...] = ((1, "killed"), (2, "finished"))
    for n_steps, how in ends:
        # The library names a run's folder by the second.
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / str(n_steps)))
        sink = WandbSink(settings)
        for number in range(n_steps):
            for point in (step(number, loss=0.5), Point(EVALUATION, number, {"evaluation/reward": 0.25})):
                if not sink.has(point.marker, point.step):
                    sink.write(point)
        sink.end(how)
    records = logged_in(tmp_path)
    runs = [record.run for record in records if record.HasField("run")]
    assert {(each.run_id, each.display_name, each.project) for each in runs} == {("ab", "small", "rollmill")}
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    for name, value in (("train/updated", 1.0), ("loss", 0.5), ("evaluation/reward", 0.25)):
        assert [(row["step"], row[name]) for row in rows if name in row] == [(0, value), (1, value)]
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [130, 0]


def test_prometheus_reads_the_last_value_of_each_metric_until_the_run_ends() -> None:
    port = free_port()
    sink = PrometheusSink(SinkSettings("ab", "small", prometheus_port=port))
    page = f"http://127.0.0.1:{port}/metrics"
    sink.write(step(0, **{"train/loss": 0.5}))
    sink.write(Point(EVALUATION, 0, {"evaluation/reward": 0.25}))
    sink.write(step(1, **{"train/loss": 0.75, "train/ratio/max/verifiers:a": 1.5}))
    # A checkpoint of the step before took longer than a step.
    sink.write(Point("apart", 0, {"train/checkpoint_s": 2.0}))
    assert sink.has(STEP, 1)
    assert not sink.has(STEP, 2)
    lines = httpx.get(page).text.splitlines()
    for line in (
        'rollmill_train_loss{run="small"} 0.75',
        'rollmill_train_ratio_max_verifiers_a{run="small"} 1.5',
        'rollmill_evaluation_reward{run="small"} 0.25',
        'rollmill_step{run="small"} 1.0',
        'rollmill_policy_version{run="small"} 0.0',
    ):
        assert line in lines
    sink.end("finished")
    with pytest.raises(httpx.ConnectError):
        httpx.get(page)


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (None, "finished"),
        (RuntimeError(), "failed"),
        (ExceptionGroup("", [OSError()]), "failed"),
        (KeyboardInterrupt(), "killed"),
        (asyncio.CancelledError(), "killed"),
    ],
)
async def test_sinks_get_how_the_run_ended(tmp_path: Path, error: BaseException | None, how: str) -> None:
    script = (
        "import pathlib\n"
        "from rollmill.tasks.observe.sinks import sink_process as p\n"
        "class Listening:\n"
        f"    def end(self, how): pathlib.Path({str(tmp_path / 'end')!r}).write_text(how)\n"
        "p.make_feeds = lambda settings, report: [p.Feed('listening', Listening, report)]\n"
        "p.run_sinks(p.make_feeds)\n"
    )
    with suppress(type(error) if error else OSError):
        async with SinkClient(SinkSettings("ab", "run"), print, (sys.executable, "-c", script)):
            if error:
                raise error
    assert (tmp_path / "end").read_text() == how


async def test_an_unreachable_sink_is_reported_once_and_counted_and_the_run_continues(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").write_text("a file, where a folder should be made")
    settings = SinkSettings("ab", "run", tensorboard=str(tmp_path / "taken" / "tensorboard"))
    messages: list[str] = []
    async with SinkClient(settings, messages.append) as sinks:
        for number in range(3):
            sinks.put(step(number))
    (line,) = messages
    assert line.startswith("TensorBoard: 1 points wait: ")
    assert "all points are in the data set `metrics`" in line
    assert sinks.n_failures == 4


async def test_a_process_that_dies_is_reported_and_later_points_are_dropped(tmp_path: Path) -> None:
    messages: list[str] = []
    words = (sys.executable, "-c", "raise SystemExit(3)")
    async with SinkClient(SinkSettings("ab", "run"), messages.append, words) as sinks:
        for number in range(3):
            sinks.put(step(number))
    assert [line.splitlines()[0] for line in messages] == ["sinks: their process ended with exit status 3"]


@pytest.mark.parametrize("timeout_s", [0.2])
async def test_a_sink_that_hangs_is_not_waited_for(tmp_path: Path, timeout_s: float) -> None:
    script = (
        "import pathlib, time\n"
        "from rollmill.tasks.observe.sinks import sink_process as p\n"
        "class Hanging:\n"
        "    def has(self, marker, step): return False\n"
        "    def write(self, point):\n"
        f"        pathlib.Path({str(tmp_path / 'hangs')!r}).touch()\n"
        "        time.sleep(600)\n"
        "    def end(self, how): pass\n"
        "p.make_feeds = lambda settings, report: [p.Feed('slow', Hanging, report)]\n"
        "p.run_sinks(p.make_feeds)\n"
    )
    messages: list[str] = []
    settings = SinkSettings("ab", "run", timeout_s=timeout_s)
    async with SinkClient(settings, messages.append, (sys.executable, "-c", script)) as sinks:
        sinks.put(step(0))
        async with asyncio.timeout(60):
            while not (tmp_path / "hangs").exists():  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(0.02)
    assert [line.splitlines()[0] for line in messages] == ["sinks: their process ended with signal SIGKILL"]


class Flaky:
    """Fails at its first write."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.ended: list[RunEnd] = []
        self.has_failed = False

    def has(self, marker: str, step: int) -> bool:
        return False

    def write(self, point: Point) -> None:
        if not self.has_failed:
            self.has_failed = True
            raise OSError("not now")
        self.steps.append(point.step)

    def end(self, how: RunEnd) -> None:
        self.ended.append(how)


def test_points_that_a_sink_refused_are_sent_with_the_next_point_in_order() -> None:
    sink, reports = Flaky(), []
    feed = Feed("flaky", lambda: sink, lambda *report: reports.append(report))
    feed.add([step(0)])
    feed.add([step(1)])
    feed.end("finished")
    assert sink.steps == [0, 1]
    assert sink.ended == ["finished"]
    assert reports == [("flaky", 1, "OSError: not now")]


def test_names_say_reduction_and_environment_and_means_of_nothing_are_left_out() -> None:
    metrics = [
        Metric("train/tokens", "all", "value", 3.0),
        Metric("train/ratio", "addition", "max", 1.5),
        Metric("drops/lost_tokens", "all", "mean", math.nan),
    ]
    assert metric_values(metrics) == {"train/tokens": 3.0, "train/ratio/max/addition": 1.5}


def test_names_of_stats_and_environments_never_meet_whatever_an_environment_is_called() -> None:
    stats: tuple[Stat, ...] = ("value", "mean", "std", "min", "max")
    metrics = [Metric("train/ratio", env, stat, 1.0) for env in ("all", *stats) for stat in stats]
    assert len(metric_values(metrics)) == len(metrics)


def test_every_metric_of_a_step_is_in_one_point() -> None:
    """A resumed run finds missing metrics by point, so a metric that is stored apart needs a separate point."""
    apart = [Metric(name, "all", "max", 2.0) for name in sorted(APART)]
    trained = [Metric("train/loss", "all", "mean", 0.5), Metric("train/updated", "all", "value", 1.0)]
    live = [*make_points(0, trained), *make_points(0, apart)]
    assert make_points(0, [*apart, *trained]) == live
    assert live[0] == Point(STEP, 0, {"train/loss/mean": 0.5, "train/updated": 1.0})
    assert [(each.marker, dict(each.values)) for each in live[1:]] == [
        (f"{metric.name}/max", {f"{metric.name}/max": 2.0}) for metric in apart
    ]
    assert [each.marker for each in make_points(0, [Metric("new/one_s", "all", "value", 1.0)])] == [
        "new/one_s"
    ]
