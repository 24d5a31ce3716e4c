"""Collections whose policy writes programs and commands, some of which attack: everything is a row, and nothing is left."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
import pytest
from flow_processes import Runs
from marked_processes import find_marked_processes

from rollmill.flows.prefect_integration.prefect_api import QUIET_TERMINAL, SHORT_RETRIES
from rollmill.tasks.processes.launched_process import free_port
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.verify.run_verification import verify_run
from tests.stubs.toy_settings import validate_toy
from tests.stubs.vllm_server import StubVllmServer

pytestmark = [pytest.mark.service, pytest.mark.sandbox]

STEPS, GROUPS, GROUP_SIZE = 2, 4, 8
# As the tokenizer writes bytes: the fifth is the end of a line.
FURTHER_CHARACTERS = "`{}\"'\u010a_&#\\$^~%ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def model(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has the characters of programs; the stub reads nothing else of it."""
    folder = tmp_path_factory.mktemp("wordy") / "model"
    shutil.copytree(tied_model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {each: len(vocabulary) + number for number, each in enumerate(FURTHER_CHARACTERS)}
    path.write_text(json.dumps(tokenizer))
    return folder


def collect(
    folder: Path, api: str, model: Path, answers: Sequence[str], settings: Mapping[str, Mapping[str, object]]
) -> pl.DataFrame:
    """Collect a run from a server that gives these answers; returns rollouts with their scores."""
    server = StubVllmServer(model, rollout_s=0.0, answers=answers, closing="done")
    port = free_port()
    control = server.serve(port)
    sizes = {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_completion_tokens": 512}
    config = validate_toy(
        {
            "steps": STEPS,
            "model": str(model),
            "rollout": sizes | settings["rollout"],
            "score": settings["score"],
            "serve": {"urls": [f"http://127.0.0.1:{port}"], "max_model_len": 4096},
            "evaluate": {"n_prompts": 2},
            "store": {"root": str(folder / "runs")},
        }
    )
    marker = f"sandbox-runs-{folder.name}"
    variables = {"PREFECT_API_URL": api, "WORKPLACE": marker, "PLANTED_API_KEY": "planted-secret"}
    runs = Runs(folder, config, os.environ | QUIET_TERMINAL | SHORT_RETRIES | variables)
    try:
        runs.start("attacked", "collect")
        assert runs.ended() == 0, runs.log.read_text()[-3000:]
    finally:
        runs.close()
        control.stop()
    assert not find_marked_processes(marker), "a process was left behind"
    run = RunFolder(config.store.root + "/attacked")
    assert not verify_run(run).findings
    rollouts, scores = (
        pl.scan_ipc(f"{run.location}/{name}/**/*.arrow", hive_partitioning=True).collect()
        for name in ("rollouts", "scores")
    )
    assert len(rollouts) == len(scores) == STEPS * GROUPS * GROUP_SIZE
    return rollouts.join(scores, on="trajectory_id", suffix="_of_score")


def write_problems(folder: Path, problem: Mapping[str, object]) -> dict[str, object]:
    path = folder / "problems.jsonl"
    lines = [json.dumps({"prompt": f"task {number}", **problem}) for number in range(20)]
    path.write_text("\n".join(lines))
    return {"path": str(path), "answer_column": "", "columns": list(problem)}


def block(program: str) -> str:
    return f"```python\n{program}\n```"


def test_programs_that_attack_are_rows_with_reward_zero(
    tmp_path: Path, prefect_api: str, model: Path
) -> None:
    programs = {
        block("def add(a, b): return a + b"): 1.0,
        block("import os\nos._exit(0)"): 0.0,
        block("import os\nwhile True: os.fork()"): 0.0,
        block("while True: pass"): 0.0,
        block("class A:\n  def __eq__(self, other): return True\ndef add(a, b): return A()"): 0.0,
        block(f"def add(a, b): return len(open('{tmp_path}/runs/attacked/run.json').read())"): 0.0,
        block("import os\ndef add(a, b): return 3 if os.environ['PLANTED_API_KEY'] else 4"): 0.0,
        "no program": 0.0,
    }
    settings: dict[str, Mapping[str, object]] = {
        "rollout": {
            "environment": "prompts",
            "prompts": write_problems(tmp_path, {"tests": ["assert add(1, 2) == 3"]}),
        },
        "score": {"scorer": "code", "workers": 2, "sandbox": {"timeout_s": 2.0}},
    }
    rows = collect(tmp_path, prefect_api, model, list(programs), settings)
    assert rows["status_of_score"].unique().to_list() == ["scored"]
    said = [json.loads(each)[-1]["content"] for each in rows["messages"]]
    assert rows["reward"].to_list() == [programs[each] for each in said]
    assert set(said) == set(programs)


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


@pytest.mark.long
@pytest.mark.parametrize("n_workers", [0, 2])
def test_commands_that_attack_are_rows_and_files_last_as_long_as_the_episode(
    tmp_path: Path, prefect_api: str, model: Path, n_workers: int
) -> None:
    answers = [
        call("cat start > answer"),
        call("sleep 1000"),
        call("env; cat /proc/*/environ"),
        call(f"cat {tmp_path}/runs/attacked/run.json; echo changed > {tmp_path}/problems.jsonl"),
        "nothing to do",
    ]
    task = {"setup": "echo begin > start", "check": "grep -qx begin answer"}
    problems = write_problems(tmp_path, task)
    settings: dict[str, Mapping[str, object]] = {
        "rollout": {
            "environment": "shell",
            "prompts": problems,
            "sandbox": {"timeout_s": 1.0},
            "env_workers": n_workers,
        },
        "score": {"scorer": "environment"},
    }
    rows = collect(tmp_path, prefect_api, model, answers, settings)
    assert rows["status"].unique().to_list() == ["complete"]
    assert rows["status_of_score"].unique().to_list() == ["scored"]
    texts = rows["messages"].to_list()
    assert rows["reward"].to_list() == [float("start > answer" in each) for each in texts]
    assert set(rows["reward"]) == {0.0, 1.0}
    assert "planted-secret" not in "".join(texts)
    assert any("it exceeded the limit of time" in each for each in texts)
    assert any("No such file or directory" in each for each in texts)
    assert "changed" not in Path(str(problems["path"])).read_text()
