"""`rollmill list`: the runs in a folder and their states."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from rollmill.tasks.look.tables.run_list import make_runs_view
from rollmill.tasks.store.config import StoreConfig
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.lock import lock_run

Command = Callable[..., str]


def edit_manifest(folder: RunFolder, **values: object) -> None:
    path = folder.local / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_runs_are_listed_newest_first_with_their_states(small_run: RunFolder, tmp_path: Path) -> None:
    root = tmp_path / "listed"
    names = ("done", "held", "left", "wrong")
    failed_step = "batches/step=000002"
    folders = {name: RunFolder(root / name) for name in names}
    for number, name in enumerate(names):
        shutil.copytree(small_run.local, folders[name].local)
        status = "finished" if name == "done" else "running"
        edit_manifest(folders[name], status=status, created_at=f"2026-11-0{number + 1}T10:20:30+00:00")
    (folders["wrong"].local / "run.json").write_text("{")
    shutil.rmtree(folders["left"].local / failed_step)
    lock = lock_run(folders["held"], StoreConfig(root=str(root)))
    try:
        view = make_runs_view(str(root))
    finally:
        lock.release()
    shown = [(row["run"], row["state"], row["steps"], row["greedy_accuracy"]) for row in view.rows]
    assert shown == [
        ("left", "stopped", 2, 1.0),
        ("held", "running", 3, 1.0),
        ("done", "finished", 3, 1.0),
        ("wrong", "unreadable", None, None),
    ]
    assert [row["run"] for row in make_runs_view(str(root), 1).rows] == ["left"]


def test_a_folder_without_runs_lists_none(rollmill: Command, tmp_path: Path) -> None:
    assert "0 runs in" in rollmill("list", str(tmp_path / "nothing"))
    (run,) = json.loads(rollmill("list", "--json"))["runs"]
    assert run["run"] == "small"
