"""A Prefect server for the session, and the command `rollmill` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from marked_processes import find_marked_processes, guard_marked_processes

from rollmill.flows.prefect_integration import local_server
from rollmill.tasks.processes.launched_process import free_port
from tests.stubs.toy_settings import toy_values

SMALL: dict[str, Any] = toy_values(
    {
        "steps": 8,
        "start_model": {"hidden_size": 64, "steps": 60},
        "rollout": {"groups_per_step": 6, "group_size": 4, "max_in_flight": 24},
        "train": {"warmup_steps": 0},
        "checkpoint": {"every": 2},
        "evaluate": {"every": 4, "n_prompts": 8},
        "store": {"compaction_grace_s": 1.0},
    }
)
"""A preset of seconds: a model that has hardly learned anything, so that rewards are spread."""


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home, marker = tmp_path_factory.mktemp("prefect"), f"prefect-{uuid.uuid4().hex}"
    with guard_marked_processes(marker):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORKPLACE", marker)
            api = f"{local_server.up(home, free_port())}/api"
        yield api
        local_server.down(home)


STUB = """\
#!{python}
import json, sys, time
if "-c" in sys.argv:
    print(json.dumps({{"vllm": "0.32.0"}}))
    sys.exit()
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.stubs import vllm_server
after = lambda word: sys.argv[sys.argv.index(word) + 1]
behaviour = lambda: json.loads(Path({behaviour!r}).read_text())
while behaviour().get("is_down"):
    time.sleep(0.1)
server = vllm_server.StubVllmServer(Path(after("--model")), 0.0)
server.serve(int(after("--port")))
while True:
    server.rollout_s = behaviour().get("rollout_s", 0.0) if server.asked else 0.0
    time.sleep(0.1)
"""


def set_behaviour(folder: Path, **how: object) -> None:
    """Set how the stub in a folder behaves from now."""
    new = folder / "stub.new"
    new.write_text(json.dumps(how))
    new.rename(folder / "stub.json")


@pytest.fixture
def set_stub(tmp_path: Path) -> Callable[..., None]:
    """Set how the stub of `stub_python` behaves from now."""
    return partial(set_behaviour, tmp_path)


def make_stub(folder: Path) -> str:
    """For `serve.python`: it is launched as vLLM is, and reads only the tokenizer of the model.

    It answers after the `rollout_s` of the last `set_behaviour`, at once without one; the warm-up request at once too.
    It starts once it is not `is_down`.
    """
    set_behaviour(folder)
    script = folder / "stub" / "bin" / "python"
    script.parent.mkdir(parents=True)
    root, behaviour = str(Path(__file__).parents[2]), str(folder / "stub.json")
    script.write_text(STUB.format(python=sys.executable, root=root, behaviour=behaviour))
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def stub_python(tmp_path: Path) -> str:
    """The stub of `make_stub`, which answers at once."""
    return make_stub(tmp_path)


@pytest.fixture(scope="session")
def write_stub() -> Callable[[Path], str]:
    """`make_stub`, for folders of modules."""
    return make_stub


class Workplace:
    """A folder to run the command in, and what is left of its processes."""

    def __init__(self, folder: Path, api: str, start_models: Path) -> None:
        self.folder = folder
        self.marker = f"workplace-{uuid.uuid4().hex}"
        self.vllm_python = vllm_python = (
            Path(sys.executable).parent.parent.parent / ".venv-vllm" / "bin" / "python"
        )
        serve = SMALL["serve"] | {"python": str(vllm_python)}
        preset = SMALL | {"serve": serve}
        (folder / "models").symlink_to(start_models)
        (folder / "conf").mkdir()
        (folder / "conf" / "small.yaml").write_text(yaml.safe_dump(preset))
        self.environment = os.environ | {
            "PREFECT_API_URL": api,
            "WORKPLACE": self.marker,
            "SPT_NOENV": "1",  # vLLM's processes take titles, and would write them over their environment
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `rollmill WORDS` in the background."""
        return subprocess.Popen(
            [str(Path(sys.executable).parent / "rollmill"), *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, timeout_s: float = 900.0) -> subprocess.CompletedProcess[str]:
        """Run `rollmill WORDS` to its end."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(words, process.returncode, output)

    @contextmanager
    def worker(self, pool: str, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
        """A worker of a work pool, for as long; what it says is in worker.log."""
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool],
                cwd=self.folder,
                env=self.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=120)

    def processes(self) -> dict[int, str]:
        """Command line of every living process that was started from here, by process id."""
        return find_marked_processes(self.marker)


@pytest.fixture(scope="session")
def start_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where start models are kept: the first run of the session makes the preset's, the others find it."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def open_workplace(
    prefect_api: str, start_models: Path
) -> Callable[[Path], AbstractContextManager[Workplace]]:
    """A workplace in a folder, for as long; nothing that was started there is left behind, even if the tests are killed."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Workplace]:
        place = Workplace(folder, prefect_api, start_models)
        with guard_marked_processes(place.marker):
            yield place
            assert not place.processes(), "a process was left behind"

    return opened


@pytest.fixture
def workplace(
    tmp_path: Path, open_workplace: Callable[[Path], AbstractContextManager[Workplace]]
) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as place:
        yield place
